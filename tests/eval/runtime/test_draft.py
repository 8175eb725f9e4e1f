"""A draft model that is the target is always right."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.runtime.engine import Request
from eval.runtime.sampling import Sampling
from heads.registry import build_head
from heads.target.model import FrozenTarget
from tests.small_targets import open_engine

TargetOf = Callable[[str], FrozenTarget]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float64) for family in ("llama", "gemma2", "gpt2", "mistral-window", "deepseek_v3")),
        ("llama", torch.float32),
    ],
)
def test_a_draft_that_is_the_target_is_always_right(family: str, dtype: torch.dtype, target_of: TargetOf) -> None:
    """Whatever was lost of its cache would show as a wrong guess, in the model's own attention as in the native
    decoders'. (A dynamic tree may prune the right path.)"""
    model: Any = copy.deepcopy(target_of(family).model)
    target = FrozenTarget(model.to(dtype), family)
    head: Any = build_head("draft", {"fresh": {}}, target, torch.ones(target.vocab_size))
    head.model.load_state_dict(target.model.state_dict())
    if "experts" in str(head.model):
        head.model.set_experts_implementation("eager")  # the grouped kernels know no float64
    head = head.to(target.dtype)
    requests = [
        Request([5, 6, 7 + i], 25, Sampling(temperature=float(i % 2), seed=i), ignore_eos=True) for i in range(3)
    ]
    for shape in ("chain:3", "static:2.1.1", "static:3.2.1"):
        outputs = open_engine(target, head, shape, batch_size=2, max_length=128).generate(requests)
        assert all(output.rounds == 6 and output.accepted == [3] * 6 for output in outputs), shape
