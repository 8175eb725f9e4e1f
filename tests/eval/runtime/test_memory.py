"""What does not fit is refused before it is taken, with what would fit."""

from collections.abc import Callable

import pytest
import torch

from eval.runtime.engine import Engine, Request
from eval.runtime.memory import Need, check_memory, free_bytes, is_out_of_memory, largest, need_of
from heads.backends.selection import HUGGINGFACE
from heads.errors import UserError
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from heads.tree import parse_shape

TargetOf = Callable[[str], FrozenTarget]
NEED = Need(batch_size=4, capacity=640, nodes=8, per_slot=1000, per_node=500)


def test_the_largest_that_fits_fits_and_one_more_does_not() -> None:
    room = 1_500_000
    for field, most in (("batch_size", 2), ("capacity", 320), ("nodes", 0)):
        assert largest(NEED, field, room) == most
    assert NEED.bytes == 4 * (640 * 1000 + 8 * 500)


def test_the_refusal_says_how_much_is_needed_and_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.runtime.memory.free_bytes", lambda device: 2 * 2**30)
    need = Need(batch_size=64, capacity=4096, nodes=32, per_slot=131072, per_node=2**20)
    message = (
        r"big: 64 sequences of 4096 slots, 32 nodes a round, need 34.0 GiB beside the weights; 1.9 GiB are free on "
        r"cpu; with the rest as it is, a batch of 3 would fit"
    )
    with pytest.raises(UserError, match=message):
        check_memory(need, torch.device("cpu"), "big")
    monkeypatch.setattr("eval.runtime.memory.free_bytes", lambda device: None)
    check_memory(need, torch.device("cpu"), "big")


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        (dict(batch_size=1024), r"need \d+\.\d GiB .* 0\.9 GiB are free on cpu; .*a batch of \d+ "),
        (dict(capacity=1 << 21), r"1 sequences of 2097152 slots, 8 nodes .*sequences of \d+"),
        (dict(nodes=200_000, capacity=4096), r"200000 nodes a round, need .*trees of \d+ would fit"),
    ],
)
def test_too_much_of_anything_is_refused_with_what_fits(
    asked: dict[str, int], advice: str, target_of: TargetOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.runtime.memory.free_bytes", lambda device: 10**9)
    target = target_of("llama")
    modest = dict(batch_size=1, capacity=4096, nodes=8)
    check_memory(need_of(target, HUGGINGFACE, **modest, drafts=True), target.device, "it")
    need = need_of(target, HUGGINGFACE, **(modest | asked), drafts=True)
    with pytest.raises(UserError, match=advice):
        check_memory(need, target.device, "it")


def test_what_a_gpu_has_free_is_the_drivers_and_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch keeps for its own next tensors is free, too."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7_000, 90_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2_000)
    assert free_bytes(torch.device("cuda")) == 10_000


def test_an_error_that_came_of_another_for_want_of_memory_is_one() -> None:
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert is_out_of_memory(error)
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("illegal address"))


def test_what_a_resting_head_is_not_given_is_counted(target_of: TargetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[Need] = []
    monkeypatch.setattr("eval.runtime.engine.check_memory", lambda need, device, name: needs.append(need))
    target, shape = target_of("llama"), parse_shape("chain:2")
    head = build_head("eagle3", {"aux_layer_ids": [0, 1, 2]}, target, torch.ones(target.vocab_size).long()).to(
        target.dtype
    )
    Engine(target, head, shape=shape, batch_size=3, max_length=64)
    engine = Engine(target, head, shape=shape, batch_size=3, max_length=64, adaptive=True)
    assert engine.candidates is not None
    pending, controller = engine.candidates.rest.pending, engine.candidates.controller
    controller.candidate = controller.none
    engine.generate([Request([5, 6, 7], 9)])
    kept = sum(tensor.numel() * tensor.element_size() for tensor in (pending.aux_hidden_states, pending.hidden))
    assert needs[1].bytes - needs[0].bytes == kept


def test_an_engine_refuses_before_it_allocates(target_of: TargetOf) -> None:
    with pytest.raises(UserError, match=r"llama: 100000000 sequences of 512 slots.*a batch of \d+ would fit"):
        Engine(target_of("llama"), batch_size=100_000_000, max_length=512)
