"""A batch that does not fit a CPU is refused beforehand, with one that would fit."""

from collections.abc import Callable

import pytest
import torch

from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.graph import is_out_of_memory
from eval.runtime.memory import check_memory, free_bytes, row_bytes
from heads.errors import UserError
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from heads.tree import parse_shape

TargetOf = Callable[[str], FrozenTarget]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_refusal_says_how_much_is_needed_and_which_batch_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.runtime.memory.free_bytes", lambda: 2 * 2**30)
    check_memory(2**29, 3, CPU, "big")
    with pytest.raises(UserError, match=r"big: a batch of 64 needs 32.0 GiB .* 1.9 GiB are free; a batch of 3 would"):
        check_memory(2**29, 64, CPU, "big")
    with pytest.raises(UserError, match="shorten the sequences"):
        check_memory(2**40, 1, CPU, "big")
    check_memory(2**40, 1, GPU, "big")  # which refuses by itself
    monkeypatch.setattr("eval.runtime.memory.free_bytes", lambda: None)
    check_memory(2**40, 1, CPU, "big")


def test_longer_sequences_larger_trees_and_drafts_need_more(target_of: TargetOf) -> None:
    target = target_of("llama")
    modest = row_bytes(target, None, capacity=4096, nodes=8, drafts=False)
    assert row_bytes(target, None, capacity=8192, nodes=8, drafts=False) > 1.9 * modest
    assert row_bytes(target, None, capacity=4096, nodes=64, drafts=False) > modest
    assert row_bytes(target, None, capacity=4096, nodes=8, drafts=True) > modest
    assert (free_bytes() or 1) > 0


def test_an_error_that_came_of_another_for_want_of_memory_is_one() -> None:
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert is_out_of_memory(error)
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("illegal address"))


def test_what_a_paused_head_is_not_given_is_counted(target_of: TargetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[int] = []
    monkeypatch.setattr("eval.runtime.engine.check_memory", lambda need, batch_size, *_: needs.append(need))
    target, shape = target_of("llama"), parse_shape("chain:2")
    head = build_head("eagle3", {"aux_layer_ids": [0, 1, 2]}, target, torch.ones(target.vocab_size).long()).to(
        target.dtype
    )
    Engine(target, head, EngineOptions(shape=shape, batch_size=3, max_length=64))
    engine = Engine(target, head, EngineOptions(shape=shape, batch_size=3, max_length=64, adaptive=True))
    assert engine.candidates is not None
    pending, controller = engine.candidates.paused_state.pending, engine.candidates.controller
    controller.candidate = controller.none
    engine.generate([Request([5, 6, 7], 9)])
    kept = sum(tensor.numel() * tensor.element_size() for tensor in (pending.aux_hidden_states, pending.hidden))
    assert 3 * (needs[1] - needs[0]) == kept


def test_an_engine_refuses_before_it_allocates(target_of: TargetOf) -> None:
    with pytest.raises(UserError, match=r"llama: a batch of 100000000 needs .*a batch of \d+ would fit"):
        Engine(target_of("llama"), None, EngineOptions(batch_size=100_000_000, max_length=512))
