"""Commit of a round in C and by a kernel, against tensor operations, and those against what is wanted."""

from collections.abc import Iterator
from dataclasses import astuple, fields

import pytest
import torch

from heads.backends.base import Backend
from heads.backends.selection import CPU, TORCH, TRITON
from heads.backends.torch.commit import Commit, RoundState
from tests.switches import kernels_on_cpu, need_c

B = 5


def random_state(depth: int, generator: torch.Generator) -> RoundState:
    """Rows in the middle of requests of at most 60 tokens, some of them done, some at their first round or with room
    for no more than one token, some with fewer tokens than a report shows."""
    state = RoundState.new(batch_size=B, capacity=60, depth=depth, device=torch.device("cpu"), rounds=3)
    state.length.random_(1, 20, generator=generator)
    state.root.random_(0, 9, generator=generator)
    state.done.copy_(torch.rand(B, generator=generator) < 0.2)
    state.output_length.random_(1, 60, generator=generator)
    state.output_length[0] = 0 if state.done[0] else 1
    state.limit.copy_(state.output_length + torch.randint(1, 9, (B,), generator=generator)).clamp_(max=60)
    state.stops_at_eos.copy_(torch.rand(B, generator=generator) < 0.7)
    state.output.random_(0, 9, generator=generator)
    state.rounds.random_(0, 60, generator=generator)
    return state


def copy_of(state: RoundState) -> RoundState:
    return RoundState(**{field.name: getattr(state, field.name).clone() for field in fields(state)})


@pytest.fixture(params=[CPU, TRITON], ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Backends with a form of their own."""
    if request.param is CPU:
        need_c()
        yield CPU
        return
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU the kernel itself is run")
    with kernels_on_cpu():
        yield TRITON


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("eos", [[], [3], [7, 2], [8, 8, 1, 0, 5]])
def test_the_state_is_that_of_tensor_operations(eos: list[int], depth: int, tree: bool, backend: Backend) -> None:
    generator = torch.Generator().manual_seed(depth)
    cut = 0
    for _ in range(25 if backend is CPU else 10):  # the interpreter of kernels is slow
        ours = random_state(depth, generator)
        theirs, before = copy_of(ours), copy_of(ours)
        accepted = torch.randint(0, depth + 1, (B,), generator=generator)
        emitted = torch.randint(0, 9, (B, depth + 1), generator=generator)
        depths = torch.randint(0, depth + 1, (B, 7), generator=generator) if tree else None
        ends = torch.tensor(eos, dtype=torch.int64)
        known = backend.commit(ours, ends, depth)(accepted, emitted, depths)
        expected = Commit(theirs, ends, depth)(accepted, emitted, depths)
        for one, two in ((ours, theirs), (known, expected)):
            for field in fields(one):
                assert torch.equal(getattr(one, field.name), getattr(two, field.name)), field.name
        cut += int(((ours.output_length - before.output_length <= accepted) & ~before.done).sum())
    assert cut or depth == 0, "no output ended within a round"


def test_one_tree_may_serve_all_rows(backend: Backend) -> None:
    """Its depths are then one row, expanded."""
    generator = torch.Generator().manual_seed(0)
    ours = random_state(4, generator)
    theirs = copy_of(ours)
    accepted, emitted = torch.full((B,), 3), torch.randint(3, 9, (B, 5), generator=generator)
    depths = torch.tensor([[0, 1, 1, 2]])
    for state, shown in ((ours, depths.expand(B, -1)), (theirs, depths.repeat(B, 1))):
        backend.commit(state, torch.tensor([2]), 4)(accepted, emitted, shown)
    assert torch.equal(ours.reached, theirs.reached) and int(ours.reached.max()) == 2


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
    commit = TORCH.commit(state, torch.tensor([3]), 3)
    tokens, start, count = astuple(commit(torch.tensor([accepted]), torch.tensor([[5, 3, 6, 7]]), None))
    assert tokens.tolist() == [[8, 5, 3, 6, 7]] and start.item() == 10
    assert state.output_length.item() == 1 + kept and bool(state.done) == done
    assert state.output[0, 1 : 1 + kept].tolist() == [5, 3, 6, 7][:kept]
    assert state.accepted[0, 0] == min(accepted, kept) and state.reached[0, 0] == min(accepted + 1, kept, 3)
    assert count.item() == (0 if done else accepted + 1) and state.length.item() == 10 + count.item()
    assert state.root.item() == [5, 3, 6, 7][accepted] and state.report[0, :3].tolist() == [done, 1 + kept, 10 + count]
