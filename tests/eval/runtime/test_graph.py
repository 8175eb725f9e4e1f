"""A round is fit for a CUDA graph: replayed from a tape, on the same memory and with nothing of the host's, it decodes
the same text."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from eval.runtime.engine import Output, Request
from eval.runtime.sampling_params import Sampling
from heads.core.tree import parse_shape
from tests.eval.runtime.conftest import target_of
from tests.support.annotations import Log
from tests.support.small_targets import make_drafter, open_engine
from tests.support.switches import as_on_a_gpu

WAITS = {
    *("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::equal"),
    *("aten::is_nonzero", "aten::unique_dim", "aten::_unique2", "aten::bincount"),
    "aten::lift_fresh",  # of a constant that the host made, which it would copy to a GPU
}
"""Operations for which the host waits, since they need sizes or values that only the GPU knows."""


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


class Tape(TorchDispatchMode):
    """A stand-in for a CUDA graph (tests/gpu has real ones): every operation with the very tensors it had, run again on
    the same memory.

    Whatever the host computed between operations is frozen, as in a graph. An operation that waits for the device
    fails, and so does a constant that the host makes in the round, as its copy would in a capture.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        with self:
            work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in WAITS, f"{name} waits for the device"
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            assert all(x.dtype != torch.bool for x in tensors_in(args[1])), f"{name} by a mask waits for the device"
        made = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tensors_in(made)))
        return made

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.operations:
            again = tensors_in(func(*args, **kwargs))
            for old, new in zip(outputs, again, strict=True):
                assert old.shape == new.shape, f"{func} has no static shape"
                if old.data_ptr() != new.data_ptr():  # a view is in place already
                    old.copy_(new)


@pytest.fixture(autouse=True)
def gpu_steps() -> Iterator[None]:
    with as_on_a_gpu():
        yield


REQUESTS = [
    Request([5, 6, 7], 18),
    Request([9, 8, 7, 6, 5], 14, Sampling(temperature=0.9, seed=3)),
    Request([11] * 9, 16, Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=5), ignore_eos=True),
    Request([13, 4], 15, Sampling(repetition_penalty=1.4, frequency_penalty=0.5), ignore_eos=True),
]


def texts(outputs: list[Output]) -> list[tuple[list[int], list[int]]]:
    return [(output.tokens, output.accepted) for output in outputs]


@pytest.mark.parametrize(
    ("family", "name", "shape", "rule"),
    [
        ("llama", "none", "none", "match"),
        ("qwen3_5_text", "none", "none", "match"),
        ("gemma3_text", "lookup:3", "chain:3", "match"),
        ("llama", "eagle3", "chain:3", "block"),
        ("llama", "lookup:1+eagle3", "chain:3", "ratio"),
        ("llama", "lookup:1+draft", "chain:2", "match"),
        ("qwen3", "mtp", "tree:3x2x7", "match"),
        ("llama", "medusa", "static:3.2", "ratio"),
        ("mistral", "eagle3", "static:3.2", "match"),
        ("llama", "draft", "tree:2x3x7", "match"),
        ("gpt2", "early_exit:1", "static:2.2", "match"),
    ],
)
def test_replayed_rounds_decode_the_same_text(family: str, name: str, shape: str, rule: str) -> None:
    target = target_of(family)
    options: dict[str, Any] = {"shape": parse_shape(shape), "batch_size": 2, "max_length": 64, "rule": rule}
    plain, engine = (open_engine(target, make_drafter(name, target), **options) for _ in range(2))
    engine.rounds.capture = Tape
    assert texts(engine.generate(REQUESTS)) == texts(plain.generate(REQUESTS))
    assert engine.rounds.graphs and engine.rounds.capture is Tape


def test_a_round_that_cannot_be_captured_runs_plainly(caplog: Log) -> None:
    target = target_of("llama")
    expected = open_engine(target, None, max_length=64).generate(REQUESTS)
    for error, reason in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "the GPU is out of memory"),
        (RuntimeError("operation not permitted when stream is capturing\nmore"), "not permitted when stream is"),
    ):

        def refuse(work: Callable[[], None], error: RuntimeError = error) -> Any:
            raise error

        engine = open_engine(target, None, max_length=64)
        engine.rounds.capture = refuse
        caplog.clear()
        assert texts(engine.generate(REQUESTS)) == texts(expected)
        (line,) = caplog.messages
        assert reason in line and "launched one by one" in line and not engine.rounds.graphs
