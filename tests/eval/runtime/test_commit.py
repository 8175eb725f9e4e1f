"""Commit of a round: outputs end at EOS and at the limit, and rows that are done do not change."""

from dataclasses import astuple, fields

import pytest
import torch

from eval.runtime.commit import Commit, RoundState


@pytest.mark.parametrize(
    ("accepted", "room", "stops", "kept", "done"),
    [
        (3, 20, True, 2, True),  # the second of four tokens ends the text
        (3, 20, False, 4, False),  # unless its request would not have it so
        (0, 20, True, 1, False),  # nor does one that was not accepted
        (3, 1, True, 1, True),  # the limit comes before it
        (3, 4, False, 4, True),
        (1, 20, True, 2, True),  # the bonus token ends it too
    ],
)
def test_outputs_end_where_they_should(accepted: int, room: int, stops: bool, kept: int, done: bool) -> None:
    state = RoundState.new(batch_size=1, capacity=30, depth=3, device=torch.device("cpu"))
    state.done.fill_(False)
    state.length.fill_(10)
    state.root.fill_(8)
    state.output_length.fill_(1)
    state.limit.fill_(1 + room)
    state.stops_at_eos.fill_(stops)
    commit = Commit(state, torch.tensor([3]), 3)
    tokens, start, count = astuple(commit(torch.tensor([accepted]), torch.tensor([[5, 3, 6, 7]]), None))
    assert tokens.tolist() == [[8, 5, 3, 6, 7]] and start.item() == 10
    assert state.output_length.item() == 1 + kept and bool(state.done) == done
    assert state.output[0, 1 : 1 + kept].tolist() == [5, 3, 6, 7][:kept]
    assert state.accepted[0, 0] == min(accepted, kept) and state.reached[0, 0] == min(accepted + 1, kept, 3)
    assert count.item() == (0 if done else accepted + 1) and state.length.item() == 10 + count.item()
    assert state.root.item() == [5, 3, 6, 7][accepted] and state.report[0, :3].tolist() == [done, 1 + kept, 10 + count]


def test_a_row_that_is_done_does_not_change() -> None:
    state = RoundState.new(batch_size=2, capacity=30, depth=2, device=torch.device("cpu"))
    state.done[0] = False
    state.limit.fill_(9)
    state.output_length.fill_(2)
    before = {field.name: getattr(state, field.name)[1].clone() for field in fields(state)}
    result = Commit(state, torch.tensor([3]), 2)(
        torch.tensor([1, 1]), torch.full((2, 3), 7), torch.tensor([[0, 1]] * 2)
    )
    assert result.count.tolist() == [2, 0] and int(state.reached[0, 0]) == 1
    for name in ("length", "done", "limit", "output_length", "rounds"):
        assert torch.equal(getattr(state, name)[1], before[name]), name
