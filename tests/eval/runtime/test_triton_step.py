"""With every kernel on, in Triton's interpreter, a target decodes as by torch's operations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.adaptive import Controller
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.round import TargetStep
from eval.runtime.sampling import Sampling
from heads.backends.selection import TORCH, TRITON, fastest, why_not_triton, without_kernels
from heads.backends.slot_mapping import CacheSpec, ancestors
from heads.backends.triton import decoder
from heads.backends.triton.attention import tree_attention
from heads.backends.triton.availability import why_not
from heads.backends.triton.decoder import TritonDecoder
from heads.backends.triton.gemm import TILES
from heads.backends.triton.products import (
    MAKERS,
    Products,
    kept_choice,
    product_seconds,
    rows_are_independent,
    shape_of,
)
from heads.errors import UserError, warn_once
from heads.target.frozen import FrozenTarget
from heads.tree import Proposal, parse_shape
from tests.closeness import assert_close
from tests.small_targets import make_drafter
from tests.switches import kernels_on_cpu

OutOfResources: Any = pytest.importorskip("triton.runtime.errors").OutOfResources
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite runs the kernels themselves")

TargetOf = Callable[[str], FrozenTarget]


@pytest.fixture
def kernels() -> Iterator[Callable[[bool], None]]:
    """Switches the kernels on and off."""
    with ExitStack() as stack:

        def switch(on: bool) -> None:
            stack.close()
            if on:
                stack.enter_context(kernels_on_cpu())

        yield switch


def some_tree() -> tuple[Proposal, Tensor]:
    """Two rows of six nodes."""
    parents = torch.tensor([[0, 0, 0, 1, 3, 2], [0, 0, 1, 2, 3, 1]])
    above = ancestors(parents, 4)
    tokens = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(1))
    return Proposal(tokens, parents, above.sum(-1) - 1, torch.zeros(2, 6)), above


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "deepseek_v3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mistral-window", "qwen3_moe")),
    ],
)
@torch.no_grad()
def test_a_tree_gets_the_same_features_and_choices(
    family: str, kernels: Callable[[bool], None], target_of: TargetOf
) -> None:
    target = target_of(f"{family}-float32")
    proposal, above = some_tree()
    length = torch.tensor([19, 4])
    found = []
    for on in (True, False):
        kernels(on)
        spec = CacheSpec(batch_size=2, capacity=64, aux_layer_ids=(0, 1, 2), widths=(6,))
        step = TargetStep(target, (TRITON if on else TORCH).decoder(target, spec))
        assert isinstance(step.decoder, TritonDecoder) == on
        if isinstance(step.decoder, TritonDecoder):  # every product by the kernel
            weights = step.decoder.weights()
            step.decoder.products = Products({12: {shape_of(w): str(TILES[0]) for w in weights}})
            assert len(weights) >= 4 + ("experts" in str(target.model))
        for row, n in enumerate(length.tolist()):
            step.prefill(row, torch.arange(3, 3 + n)[None], 0)
        features = step.verify(proposal, None if on else above, length, 64, 4)
        found.append((features.hidden, features.aux_hidden_states, step.logits(features.hidden)))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, roundings=256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape"), [("llama", "tree:2x2x5"), ("qwen3", "chain:2"), ("deepseek_v3", "tree:2x2x5")]
)
def test_rounds_with_every_kernel_decode_the_same_text(
    family: str,
    shape: str,
    kernels: Callable[[bool], None],
    target_of: TargetOf,
    scripted_head: Any,
) -> None:
    """Greedy, sampled and filtered rows side by side; the drafts are often right and end within a round."""
    target = target_of(f"{family}-float32")
    requests = [
        Request([5, 6, 7], 7),
        Request([9, 8], 6, Sampling(temperature=0.9, seed=3), ignore_eos=True),
        Request([11] * 4, 6, Sampling(temperature=0.8, top_k=9, seed=5)),
    ]
    kernels(False)
    plain = Engine(target, None, EngineOptions(batch_size=3, max_length=64)).generate(requests)
    kernels(True)
    known = [[*r.prompt, *o.tokens] for r, o in zip(requests, plain, strict=True)]
    head = scripted_head(target, known, right=0.8, aux_layer_ids=(1,))
    head.check_features = lambda *arguments: None  # to more digits than float32 has
    engine = Engine(target, head, EngineOptions(shape=parse_shape(shape), batch_size=3, max_length=64))
    outputs = engine.generate(requests)
    assert [o.tokens for o in outputs] == [o.tokens for o in plain]
    assert sum(sum(o.accepted) for o in outputs) > 0


def test_a_request_alone_samples_as_it_would_by_torch(
    kernels: Callable[[bool], None], target_of: TargetOf, scripted_head: Any
) -> None:
    """One row, several nodes: all of them have the row's temperature and seed."""
    target, requests = target_of("llama-float32"), [Request([5, 6, 7], 9, Sampling(0.9, seed=3), ignore_eos=True)]
    kernels(False)
    plain = Engine(target, None, EngineOptions(max_length=64)).generate(requests)
    kernels(True)
    head = scripted_head(target, [[*requests[0].prompt, *plain[0].tokens]], right=1.0, aux_layer_ids=(1,))
    head.check_features = lambda *arguments: None
    outputs = Engine(target, head, EngineOptions(shape=parse_shape("chain:2"), max_length=64)).generate(requests)
    assert outputs[0].tokens == plain[0].tokens and outputs[0].rounds < plain[0].rounds


@pytest.mark.slow
@torch.no_grad()
def test_a_chain_is_bit_for_bit_what_pinned_plain_decoding_gives(
    kernels: Callable[[bool], None], target_of: TargetOf
) -> None:
    """And so is a tree with strict attention; in bfloat16, where every other order of sums shows."""
    kernels(True)
    target = target_of("llama-bfloat16")
    tokens = torch.tensor([[9, 30, 31, 32]])
    tree = torch.tensor([[9, 50, 30, 31]]), torch.tensor([[0, 0, 0, 2]]), torch.tensor([[0, 1, 1, 2]])
    depths = torch.arange(4)[None]
    hidden: dict[str, Tensor] = {}
    for name, strict in (("chain", False), ("tree", True), ("pinned", False), ("strict pinned", True)):
        spec = CacheSpec(batch_size=1, capacity=64, widths=(4,), strict=strict)
        step = TargetStep(target, TRITON.decoder(target, spec))
        assert isinstance(step.decoder, TritonDecoder)
        weights = step.decoder.weights()
        step.decoder.products = Products({4: {shape_of(w): str(TILES[0]) for w in weights}})
        step.prefill(0, torch.arange(3, 20)[None], 0)
        chain = Proposal(tokens, (depths - 1).clamp_min(0), depths, torch.zeros(1, 4))
        if name == "chain":
            hidden[name] = step.verify(chain, None, torch.tensor([17]), 64, 3).hidden[0]
        elif name == "tree":
            proposal = Proposal(*tree, torch.zeros(1, 4))
            hidden[name] = step.verify(proposal, None, torch.tensor([17]), 64, 2).hidden[0]
        else:
            rows = []
            for i in range(3):
                padded = Proposal(tokens[:, [i] * 4], chain.parents, depths, chain.scores)
                rows.append(step.verify(padded, None, torch.tensor([17 + i]), 64, 3).hidden[0, 0])
            hidden[name] = torch.stack(rows)
    assert torch.equal(hidden["chain"][:3], hidden["pinned"])
    assert torch.equal(hidden["tree"][[0, 2, 3]], hidden["strict pinned"])


def test_dependence_between_rows_is_found(kernels: Callable[[bool], None]) -> None:
    kernels(True)
    weight = torch.randn(24, 40)
    for name, multiply in MAKERS.items():
        assert name == "library" or rows_are_independent(multiply, weight, 5)

    def mixed(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w.T
        return torch.cat([y[:1] * (1 + 1e-6), y[1:]])

    assert not rows_are_independent(mixed, weight, 5)


@pytest.mark.slow
@torch.no_grad()
def test_rows_whose_parts_would_fill_the_memory_are_attended_to_one_by_one(
    kernels: Callable[[bool], None],
    target_of: TargetOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit what they get together."""
    kernels(True)
    target, (proposal, _) = target_of("mistral-window-float32"), some_tree()
    hidden, rows = [], []

    def recorded(q: Tensor, *arguments: Any, **options: Any) -> Tensor:
        rows.append(len(q))
        return tree_attention(q, *arguments, **options)

    monkeypatch.setattr(decoder, "tree_attention", recorded)
    for most, strict in ((1 << 29, False), (64, False), (64, True)):
        monkeypatch.setattr(decoder, "MOST_BYTES", most)
        step = TargetStep(
            target, TRITON.decoder(target, CacheSpec(batch_size=2, capacity=64, widths=(6,), strict=strict))
        )
        rows.clear()
        hidden.append(step.verify(proposal, None, torch.tensor([19, 4]), 64, 4).hidden)
        assert set(rows) == ({2} if most > 64 else {1})
    assert torch.equal(hidden[0], hidden[1])
    torch.testing.assert_close(hidden[0], hidden[2])


def test_products_are_timed_on_weights_that_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone weight is joined by copies; those of many layers are not."""

    def seconds(work: Callable[[], list[Tensor]], device: torch.device) -> float:
        return float(len(work()))

    monkeypatch.setattr("heads.backends.triton.products.device_seconds", seconds)
    monkeypatch.setattr("heads.backends.triton.products.COLD", 5 * 4 * 24 * 40)
    seen: list[int] = []

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(weight.data_ptr())
        return x @ weight.T

    for given, taken in ((1, 5), (5, 5), (8, 8)):
        seen.clear()
        assert product_seconds(multiply, [torch.randn(24, 40) for _ in range(given)], 3) == 1
        assert len(set(seen)) == taken


def test_a_useless_option_is_refused(scripted_head: Any, target_of: TargetOf) -> None:
    target = target_of("llama-float32")
    with pytest.raises(UserError, match="plain decoding in steps of 4 nodes has no head"):
        Engine(target, scripted_head(target, []), EngineOptions(shape=parse_shape("chain:2"), max_length=64, pinned=4))
    requests = [Request([5, 6, 7], 20), Request([4], 9, Sampling(temperature=1.0, seed=1))]
    plain = Engine(target, None, EngineOptions(batch_size=2, max_length=64)).generate(requests)
    pinned = Engine(target, None, EngineOptions(batch_size=2, max_length=64, pinned=4)).generate(requests)
    assert [o.tokens for o in pinned] == [o.tokens for o in plain] and pinned[0].rounds == plain[0].rounds


def test_what_keeps_a_gpu_from_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("heads.backends.triton.availability.launch_once", lambda device: None)
    why_not.cache_clear()

    def reason(dtype: torch.dtype) -> str | None:
        target: Any = SimpleNamespace(device=torch.device("cuda", 7), dtype=dtype)
        return why_not_triton(target)

    assert reason(torch.bfloat16) is None
    assert reason(torch.float64) == "kernels take no float64"
    monkeypatch.setattr("heads.backends.triton.availability.triton", None)
    why_not.cache_clear()
    assert reason(torch.bfloat16) == "Triton is not installed"
    why_not.cache_clear()


def test_a_gpu_that_cannot_run_the_kernels_is_given_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Triton is there but finds no compiler for what it must build at a first launch."""

    class OnGpu:
        device, dtype, name = torch.device("cuda", 7), torch.bfloat16, "some target"

    def refuse(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    monkeypatch.setattr("heads.backends.triton.availability.launch_once", refuse)
    warn_once.cache_clear()
    target: Any = OnGpu
    for capability, reason in (
        ((7, 5), "a GPU of compute capability 7.5 has no bfloat16; 8.0 has"),
        ((9, 0), "Triton fails (Failed to find C compiler. Please specify via CC environment variable)"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        caplog.clear()
        why_not.cache_clear()
        assert fastest(target) is fastest(target) is TORCH
        assert caplog.messages == [f"some target: decoded without kernels of its own, slower: {reason}"]
    why_not.cache_clear()


class Unfit:
    """Stands in for a kernel that a device cannot run."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            raise self.error

        return launch


class CompilationError(Exception):
    """Stands in for Triton's, which is not a RuntimeError either."""


@pytest.mark.parametrize(
    ("kernel", "error", "words"),
    [  # the first fails while masks are checked, the second only in a round, the third only if a row samples
        ("attention._attention", OutOfResources(147456, 101376, "shared memory"), "the kernel of tree_attention fails"),
        ("accept._accept", CompilationError("at 3:4\nmore"), "the kernel of match fails on cpu (CompilationError: at"),
        ("pick._best_of_block", RuntimeError("PassManager::run failed"), "the kernel of best_columns fails"),
    ],
)
def test_a_kernel_that_a_device_cannot_run_is_given_up_in_one_line(
    kernel: str,
    error: Exception,
    words: str,
    target_of: TargetOf,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, options = target_of("llama-float32"), EngineOptions(shape=parse_shape("chain:2"), max_length=64)
    head = make_drafter("early_exit:1", target)
    requests = [Request([5, 6, 7], 9), Request([4], 5, Sampling(temperature=1.0, seed=1))]
    expected = [o.tokens for o in Engine(target, head, options).generate(requests)]
    with kernels_on_cpu():
        monkeypatch.setattr("eval.runtime.engine.without_kernels", without_kernels)
        monkeypatch.setattr(f"heads.backends.triton.{kernel}", Unfit(error))
        warn_once.cache_clear()
        caplog.clear()
        engines = [Engine(target, head, options) for _ in range(2)]
        assert len(caplog.messages) == 1 and words in caplog.messages[0] and "slower" in caplog.messages[0]
        for engine in engines:
            assert engine.backend.name == "torch"
            assert [o.tokens for o in engine.generate(requests)] == expected
        with pytest.raises(UserError) as refusal:
            Engine(target, head, replace(options, backend="triton"))
        assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_other_errors_are_no_reason_to_give_up_kernels(target_of: TargetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a head's own, nor memory that a kernel's result does not fit in."""
    target, options = target_of("llama-float32"), EngineOptions(shape=parse_shape("chain:2"), max_length=64)
    head = make_drafter("early_exit:1", target)
    with kernels_on_cpu():
        monkeypatch.setattr("eval.runtime.engine.without_kernels", without_kernels)
        full = torch.OutOfMemoryError("CUDA out of memory")
        monkeypatch.setattr("heads.backends.triton.attention._attention", Unfit(full))
        with pytest.raises(torch.OutOfMemoryError):
            Engine(target, head, options)
        monkeypatch.undo()
        monkeypatch.setattr("eval.runtime.engine.without_kernels", without_kernels)
        monkeypatch.setattr(head, "propose", Unfit(ZeroDivisionError())[0])
        with pytest.raises(ZeroDivisionError):
            Engine(target, head, options)


class RoundedByRows(Products):
    """Products whose numbers depend on how many rows there are, as a library's do."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().__call__(x, weight, bias) * (1 + len(x) / 8)


def take_turns(controller: Controller, order: Sequence[int]) -> None:
    """The candidates of `order`, one after another, whatever the clock says."""
    turns = cycle(order)
    controller.note = lambda span: setattr(controller, "candidate", next(turns))  # type: ignore[method-assign]


def test_what_an_adaptive_draft_decodes_does_not_hang_on_the_clock(
    kernels: Callable[[bool], None], target_of: TargetOf, scripted_head: Any
) -> None:
    """Whichever candidate takes a round, its products have as many rows."""
    kernels(True)
    target, requests = target_of("llama-float32"), [Request([5, 6, 7], 8, ignore_eos=True)]
    texts = []
    for order in ((0,), (2, 0, 1), None):
        head = None if order is None else scripted_head(target, [], right=0.0, aux_layer_ids=(1,))
        options: dict[str, Any] = {"pinned": 3} if head is None else {"shape": parse_shape("chain:2"), "adaptive": True}
        engine = Engine(target, head, EngineOptions(max_length=64, **options))
        by_kernels = engine.decoder.step.decoder
        assert isinstance(by_kernels, TritonDecoder)
        by_kernels.products = RoundedByRows({})
        if head is not None and order is not None:
            head.check_features = lambda *arguments: None
            assert engine.candidates is not None
            take_turns(engine.candidates.controller, order)
        texts.append(engine.generate(requests)[0].tokens)
    assert texts[0] == texts[1] == texts[2]


def test_the_first_process_to_write_chooses_for_all(tmp_path: Path) -> None:
    path = tmp_path / "device" / "8-4096-4096-bfloat16"
    names = list(MAKERS)

    def late() -> str:
        assert kept_choice(path, lambda: names[1]) == names[1]  # another process, while this one measures
        return names[2]

    assert kept_choice(path, late) == names[1]
    assert kept_choice(path, lambda: names[2]) == names[1] and kept_choice(None, late) == "library"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
