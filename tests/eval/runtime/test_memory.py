"""What does not fit is refused before it is taken, with what would fit."""

from collections.abc import Callable

import pytest
import torch

from eval.runtime.engine import Engine
from eval.runtime.memory import Need, check_memory, largest
from heads.errors import UserError
from heads.target import FrozenTarget

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


def test_an_engine_refuses_before_it_allocates(target_of: TargetOf) -> None:
    with pytest.raises(UserError, match=r"llama: 100000000 sequences of 512 slots.*a batch of \d+ would fit"):
        Engine(target_of("llama"), batch_size=100_000_000, max_length=512)
