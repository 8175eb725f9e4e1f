"""A round is fit for a CUDA graph: replayed from a tape, on the same memory and with nothing of the host's, it decodes
the same text."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from eval.runtime.engine import Engine, Output, Request
from eval.runtime.round import read_prompts
from eval.runtime.sampling_params import Sampling
from heads.core.tree import parse_shape
from tests.eval.runtime.conftest import target_of
from tests.small_targets import make_drafter, make_target, open_engine
from tests.switches import as_on_a_gpu, kernels_on_cpu

WAITS = {
    *("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::equal"),
    *("aten::is_nonzero", "aten::unique_dim", "aten::_unique2", "aten::bincount"),
    "aten::lift_fresh",  # of a constant that the host made, which it would copy to a GPU
}
"""Operations for which the host waits, since they need sizes or values that only the GPU knows."""


class NoWaiting(TorchDispatchMode):
    """A mode that fails at the first operation for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in WAITS, f"{name} waits for the device"
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            masks = [x for x in tree_flatten(args[1])[0] if isinstance(x, Tensor) and x.dtype == torch.bool]
            assert not masks, f"{name} by a mask waits for the device"
        if name == "aten::repeat_interleave":
            assert (kwargs or {}).get("output_size") is not None or not isinstance(args[-1], Tensor), f"{name} waits"
        return func(*args, **(kwargs or {}))


class Tape(NoWaiting):
    """A stand-in for a CUDA graph: every operation with the very tensors it had, run again on the same memory.

    Whatever the host computed between operations is frozen, as in a graph. An operation that waits for the device
    fails, and so does a constant that the host makes in the round, as its copy would in a capture.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        with self:
            work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = [x for x in tree_flatten(made)[0] if isinstance(x, Tensor)]
        self.operations.append((func, args, kwargs or {}, outputs))
        return made

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.operations:
            again = [x for x in tree_flatten(func(*args, **kwargs))[0] if isinstance(x, Tensor)]
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
    Request([13, 4], 15, ignore_eos=True),
]


def taped(engine: Engine) -> Engine:
    engine.rounds.capture = Tape
    return engine


def texts(outputs: list[Output]) -> list[tuple[list[int], list[int]]]:
    return [(output.tokens, output.accepted) for output in outputs]


@pytest.mark.parametrize(
    ("family", "name", "shape", "rule"),
    [
        ("llama", "none", "none", "match"),
        ("qwen3_5_text", "none", "none", "match"),
        ("gemma3_text", "lookup:3", "chain:3", "match"),
        ("llama", "eagle3", "chain:3", "block"),
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
    engines = [open_engine(target, make_drafter(name, target), **options) for _ in range(2)]
    plain = engines[0].generate(REQUESTS)
    assert texts(taped(engines[1]).generate(REQUESTS)) == texts(plain)
    rounds = engines[1].rounds
    assert rounds.graphs and rounds.capture is Tape


def test_a_round_that_cannot_be_captured_runs_plainly(caplog: pytest.LogCaptureFixture) -> None:
    target = target_of("llama")
    expected = open_engine(target, None, max_length=64).generate(REQUESTS)
    for error, reason in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "the GPU has no memory left for them"),
        (RuntimeError("operation not permitted when stream is capturing\nmore"), "not permitted when stream is"),
    ):

        def refuse(work: Callable[[], None], error: RuntimeError = error) -> Any:
            raise error

        engine = open_engine(target, None, max_length=64)
        engine.rounds.capture = refuse
        caplog.clear()
        assert texts(engine.generate(REQUESTS)) == texts(expected)
        assert (
            len(caplog.messages) == 1 and reason in caplog.messages[0] and "launched one by one" in caplog.messages[0]
        )
        assert not engine.rounds.graphs


def test_whatever_ends_a_capture_the_rows_stay_as_they_were() -> None:
    engine = open_engine(target_of("llama"), None, max_length=64)
    state = engine.decoder.state
    with torch.inference_mode():
        state.done.fill_(False)
        state.root.fill_(7)
    before = [getattr(state, field.name).clone() for field in fields(state)]

    def refuse(work: Callable[[], None]) -> Any:
        work()
        raise KeyboardInterrupt

    engine.rounds.capture = refuse
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        engine.rounds.prepare()
    assert all(torch.equal(getattr(state, field.name), x) for field, x in zip(fields(state), before, strict=True))


def count_tensors() -> int:
    return sum(type(x) is Tensor for x in gc.get_objects())


def test_a_replayed_round_keeps_its_state_where_it_was_and_leaves_nothing_behind() -> None:
    target = target_of("llama")
    engine = taped(open_engine(target, make_drafter("eagle3", target), "tree:3x3x8", max_length=64))
    state = engine.decoder.state
    pointers = [getattr(state, f.name).data_ptr() for f in fields(state)]
    held = {name: x.data_ptr() for name, x in vars(engine.decoder.head_state).items() if isinstance(x, Tensor)}
    engine.generate(REQUESTS[:1])
    with torch.inference_mode():
        gc.collect()
        before = count_tensors()
        for _ in range(3):
            engine.rounds(64)
        gc.collect()
        assert count_tensors() == before
    assert pointers == [getattr(state, f.name).data_ptr() for f in fields(state)]
    head_state = vars(engine.decoder.head_state)
    assert held == {name: x.data_ptr() for name, x in head_state.items() if isinstance(x, Tensor)}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU torch itself refuses to wait")
@pytest.mark.parametrize(
    ("family", "kind", "shape"),
    [("llama", "eagle3", "tree:3x3x8"), ("qwen3_moe", "medusa", "static:3.2"), ("llama", "draft", "tree:2x3x7")],
)
def test_no_round_with_kernels_waits(family: str, kind: str, shape: str) -> None:
    pytest.importorskip("triton")
    sizes: Any = dict(hidden_size=64, intermediate_size=64, vocab_size=128)
    target = make_target(family, torch.float32, **sizes)
    with kernels_on_cpu(), torch.inference_mode():
        engine = open_engine(target, make_drafter(kind, target), shape, batch_size=2, max_length=64)
        read_prompts(engine.decoder, dict(enumerate(REQUESTS[:2])))
        engine.decoder.round(64)
        before = engine.decoder.state.output_length.clone()
        with NoWaiting():
            engine.decoder.round(64)
            engine.reports.send()
        assert (engine.decoder.state.output_length > before).all()


def test_the_watch_sees_what_waits() -> None:
    x, mask = torch.arange(4), torch.tensor([True, False, True, False])
    for work in (lambda: x[mask], lambda: float(x.sum()), lambda: torch.tensor([1, 2]), lambda: x.repeat_interleave(x)):
        with pytest.raises(AssertionError, match="wait"), NoWaiting():
            work()
