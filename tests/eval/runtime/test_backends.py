"""Whichever backend decodes, the text is the same, and nothing of another backend runs."""

import pytest
import torch

from eval.runtime.engine import Engine, EngineOptions, Request, Sampling
from heads.backends.cpu import library
from heads.errors import UserError
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from heads.tree import parse_shape
from tests.launches import Launches
from tests.small_targets import make_head, make_target, open_engine, texts
from tests.switches import kernels_on_cpu, need_c

WAYS = (
    *(("eagle3", "none", "match"), ("eagle3", "chain:3", "match"), ("eagle3", "tree:3x2x6", "match")),
    *(("draft", "static:2.1", "match"), ("draft", "chain:2", "match"), ("medusa", "tree:2x2x4", "match")),
    *(("eagle3", "chain:3", "block"), ("eagle3", "static:2.2", "ratio")),
)
REQUESTS = [
    Request([5, 6, 7], 14),
    Request([9, 8], 12, Sampling(temperature=0.9, seed=3), ignore_eos=True),
    Request([11] * 4, 13, Sampling(temperature=1.4, top_k=9, seed=5), ignore_eos=True),
]


def small_target() -> FrozenTarget:
    """Few tokens, so that an untrained head is right now and then."""
    return make_target("llama", torch.float32, hidden_size=64, intermediate_size=64, vocab_size=19)


def decode(target: FrozenTarget, kind: str, shape: str, rule: str, backend: str) -> list[list[int]]:
    head = None
    if kind == "eagle3" and shape != "none":
        head = make_head(target)
    elif shape != "none":
        with torch.random.fork_rng():
            torch.manual_seed(1)
            settings = {"layers": [0, 2]} if kind == "draft" else {}
            head = build_head(kind, settings, target, torch.ones(target.vocab_size)).float()
    options = EngineOptions(shape=parse_shape(shape), batch_size=3, max_length=64, rule=rule, backend=backend)
    engine = Engine(target, head, options)
    outputs = engine.generate(REQUESTS)
    assert engine.backend.name == backend and (head is None or any(map(sum, (o.accepted for o in outputs))))
    return texts(outputs)


@pytest.mark.parametrize(("kind", "shape", "rule"), WAYS)
def test_a_cpu_decodes_by_c_what_it_decodes_by_torch(kind: str, shape: str, rule: str) -> None:
    need_c()
    target = small_target()
    by_torch = decode(target, kind, shape, rule, "torch")
    assert decode(target, kind, shape, rule, "cpu") == decode(target, kind, shape, rule, "huggingface") == by_torch


@pytest.mark.parametrize("backend", ["torch", "huggingface"])
def test_torch_runs_neither_c_nor_kernels(backend: str) -> None:
    """Both stand ready: the library is looked for at its first use, and kernels would take these tensors."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU kernels are not interpreted")
    target = small_target()
    with kernels_on_cpu(), Launches() as launches:
        for way in WAYS:
            decode(target, *way, backend)
        assert library.load.cache_info().currsize == 0
    assert launches.names and not [name for name in launches.names if not hasattr(torch.ops.aten, name)]


@pytest.mark.parametrize("name", ["cuda", "cpu", "triton"])
def test_a_backend_that_cannot_be_had_is_refused(name: str) -> None:
    target = make_target("llama", torch.float64, hidden_size=64, intermediate_size=64, vocab_size=19)
    with kernels_on_cpu(), pytest.raises(UserError, match="backend"):  # which take no float64; and without C
        open_engine(target, None, max_length=64, backend=name)
