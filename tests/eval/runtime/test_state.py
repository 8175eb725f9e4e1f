"""What a round decides, taken into the state in C, against the same in tensor operations."""

from dataclasses import astuple, fields

import pytest
import torch
from torch import Tensor

from eval.runtime import state as module
from eval.runtime.state import RoundState, Settlement

B = 5


def random_state(depth: int, generator: torch.Generator) -> RoundState:
    """Rows in the middle of requests of at most 37 tokens, some of them done, some reported for the first time."""
    state = RoundState.new(batch_size=B, capacity=60, depth=depth, device=torch.device("cpu"), rounds=3)
    state.length.random_(1, 20, generator=generator)
    state.root.random_(0, 9, generator=generator)
    state.done.copy_(torch.rand(B, generator=generator) < 0.2)
    state.output_length.random_(1, 29, generator=generator)
    state.limit.copy_(state.output_length + torch.randint(1, 9, (B,), generator=generator))
    state.heeds_eos.copy_(torch.rand(B, generator=generator) < 0.7)
    state.output.random_(0, 9, generator=generator)
    state.rounds.random_(0, 20, generator=generator)
    return state


def copy_of(state: RoundState) -> RoundState:
    return RoundState(**{field.name: getattr(state, field.name).clone() for field in fields(state)})


@pytest.mark.skipif(module.load() is None, reason="no C compiler")
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("eos", [[], [3], [7, 2]])
def test_the_state_is_that_of_tensor_operations(eos: list[int], depth: int, tree: bool) -> None:
    generator = torch.Generator().manual_seed(depth)
    for _ in range(40):
        ours = random_state(depth, generator)
        theirs = copy_of(ours)
        accepted = torch.randint(0, depth + 1, (B,), generator=generator)
        emitted = torch.randint(0, 9, (B, depth + 1), generator=generator)
        deepest = torch.randint(0, depth + 1, (B,), generator=generator) if tree else None
        known = Settlement(ours, torch.tensor(eos, dtype=torch.int64), depth)(accepted, emitted, deepest)
        other = Settlement(theirs, torch.tensor(eos, dtype=torch.int64), depth)
        other.library = None
        expected = other(accepted, emitted, deepest)
        for one, two in ((ours, theirs), (known, expected)):
            for field in fields(one):
                assert torch.equal(getattr(one, field.name), getattr(two, field.name)), field.name


def settle(state: RoundState, accepted: int, emitted: list[int]) -> tuple[Tensor, ...]:
    settlement = Settlement(state, torch.tensor([3]), len(emitted) - 1)
    return astuple(settlement(torch.tensor([accepted]), torch.tensor([emitted]), None))


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize(
    ("accepted", "room", "heeds", "kept", "done"),
    [
        (3, 20, True, 2, True),  # the second of four tokens ends the text
        (3, 20, False, 4, False),  # unless its request would not have it so
        (0, 20, True, 1, False),  # nor does one that was not accepted
        (3, 1, True, 1, True),  # the limit comes before it
        (3, 4, False, 4, True),
        (1, 20, True, 2, True),  # the bonus token ends it too
    ],
)
def test_outputs_end_where_they_should(
    compiler: bool, accepted: int, room: int, heeds: bool, kept: int, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        monkeypatch.setattr(module, "load", lambda: None)
    state = RoundState.new(batch_size=1, capacity=30, depth=3, device=torch.device("cpu"))
    state.done.fill_(False)
    state.length.fill_(10)
    state.root.fill_(8)
    state.output_length.fill_(1)
    state.limit.fill_(1 + room)
    state.heeds_eos.fill_(heeds)
    tokens, start, count = settle(state, accepted, [5, 3, 6, 7])
    assert tokens.tolist() == [[8, 5, 3, 6, 7]] and start.item() == 10
    assert state.output_length.item() == 1 + kept and bool(state.done) == done
    assert state.output[0, 1 : 1 + kept].tolist() == [5, 3, 6, 7][:kept]
    assert state.accepted[0, 0] == min(accepted, kept) and state.reached[0, 0] == min(accepted + 1, kept, 3)
    assert count.item() == (0 if done else accepted + 1) and state.length.item() == 10 + count.item()
    assert state.root.item() == [5, 3, 6, 7][accepted] and state.report[0, :3].tolist() == [done, 1 + kept, 10 + count]
