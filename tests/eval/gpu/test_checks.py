"""The checks that need a GPU; scripts/gpu_suite.py runs them too."""

import pytest
import torch

from eval.gpu.checks import CHECKS, kernels_equal_their_twins, make_head, make_target, some_requests, texts
from eval.gpu.states import paths_equal_their_twins, states_equal_their_twins
from eval.gpu.trees import picks_are_those_of_tensor_operations, trees_grow_as_on_a_cpu
from eval.runtime.engine import Engine, EngineOptions
from heads.tree import parse_shape


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    assert torch.cuda.is_available(), "no GPU here"
    CHECKS[name]()


def test_the_checks_own_models_decode_exactly_on_a_cpu() -> None:
    """And their twins agree with themselves: on a CPU no kernel runs."""
    twins = kernels_equal_their_twins, states_equal_their_twins, paths_equal_their_twins
    for check in (*twins, trees_grow_as_on_a_cpu, picks_are_those_of_tensor_operations):
        check(torch.device("cpu"))
    target = make_target("llama", torch.float32, torch.device("cpu"))
    requests = some_requests(target.vocab_size, 3, 8)
    plain = Engine(target, None, EngineOptions(max_length=256)).generate(requests)
    engine = Engine(target, make_head(target), EngineOptions(shape=parse_shape("tree:3x3x8"), max_length=256))
    assert texts(engine.generate(requests)) == texts(plain)
