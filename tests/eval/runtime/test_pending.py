"""A paused head is extended later by what was observed: every token once, in order, whoever kept it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eval.runtime.candidates import PATIENCE, PENDING, PendingStates
from eval.runtime.engine import Request
from heads.backends.torch.commit import RoundState
from heads.base import Observation
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from tests.small_targets import open_engine

B = 3
Known = list[list[tuple[int, float, float]]]
"""By row: each token, and the first value of its auxiliary hidden states and of its hidden state."""


def new_pending(asks: bool = True) -> tuple[PendingStates, RoundState]:
    """Not `asks`: as on a GPU."""
    rounds = RoundState.new(batch_size=B, capacity=2000, depth=2, device=torch.device("cpu"))
    rounds.done.fill_(False)
    return PendingStates(rounds, on_host=asks), rounds


def make_round(rounds: RoundState, live: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Observation:
    """A round of plain decoding, in which the rows that are live (B,) go on."""
    tokens = torch.cat([rounds.root[:, None], torch.randint(1, 99, (B, 1), generator=generator)], dim=1)
    aux_hidden_states, hidden = torch.randn(B, 1, 6, generator=generator), torch.randn(B, 1, 4, generator=generator)
    start = rounds.length.clone()
    rounds.root.copy_(tokens[:, 1])
    rounds.length.add_(live)
    return Observation(
        tokens, aux_hidden_states.to(dtype), hidden.to(dtype), start, live.long(), torch.zeros(B, 1).long()
    )


def take(accepted_tokens: Observation, known: Known) -> None:
    M = accepted_tokens.tokens.shape[1] - 1
    assert (
        accepted_tokens.missed
        and accepted_tokens.nodes is None
        and accepted_tokens.aux_hidden_states.shape[1] == accepted_tokens.hidden.shape[1] == M <= PENDING
    )
    for row, (start, count) in enumerate(
        zip(accepted_tokens.start.tolist(), accepted_tokens.count.tolist(), strict=True)
    ):
        if count:
            assert start == len(known[row]), "no gap, and nothing twice"
        for j in range(count):
            place = float(accepted_tokens.aux_hidden_states[row, j, 0]), float(accepted_tokens.hidden[row, j, 0])
            known[row].append((int(accepted_tokens.tokens[row, j]), *place))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asks", [True, False])
def test_all_that_was_kept_is_given_once(asks: bool, dtype: torch.dtype) -> None:
    pending, rounds = new_pending(asks)
    generator = torch.Generator().manual_seed(0)
    made: Known = [[] for _ in range(B)]
    known: Known = [[] for _ in range(B)]
    for rest in (1, 5, PENDING, 3 * PENDING + 7, 2):
        for _ in range(rest):
            if not pending.has_room(1):
                for accepted_tokens in pending.drain():
                    take(accepted_tokens, known)
                assert pending.has_room(1)
            live = torch.rand(B, generator=generator) < torch.tensor([1.0, 0.6, 0.9])
            fresh = make_round(rounds, live, generator, dtype)
            for row in live.nonzero()[:, 0].tolist():
                place = float(fresh.aux_hidden_states[row, 0, 0]), float(fresh.hidden[row, 0, 0])
                made[row].append((int(fresh.tokens[row, 0]), *place))
            pending.keep(fresh)
        for accepted_tokens in pending.drain():
            take(accepted_tokens, known)
        assert known == made
    assert not list(pending.drain())


@pytest.mark.parametrize("asks", [True, False])
def test_rows_that_ended_or_began_anew_are_not_given_of(asks: bool) -> None:
    pending, rounds = new_pending(asks)
    generator, everyone = torch.Generator().manual_seed(0), torch.ones(B, dtype=torch.bool)
    for _ in range(3):
        assert pending.has_room(1)
        pending.keep(make_round(rounds, everyone, generator, torch.float32))
    rounds.done[0] = True
    pending.forget(torch.tensor([False, True, False]))
    rounds.length[1] = 20
    assert pending.has_room(1)
    pending.keep(make_round(rounds, ~rounds.done, generator, torch.float32))
    (accepted_tokens,) = pending.drain()
    assert accepted_tokens.count.tolist() == [0, 1, 4]
    assert accepted_tokens.start.tolist()[1:] == [20, 0]


@pytest.mark.parametrize("asks", [True, False])
def test_a_full_row_that_is_done_harms_no_other(asks: bool) -> None:
    pending, rounds = new_pending(asks)
    pending.block = pending.room = 4
    generator, everyone = torch.Generator().manual_seed(0), torch.ones(B, dtype=torch.bool)
    made = []
    for _ in range(4):
        assert pending.has_room(1)
        pending.keep(make_round(rounds, everyone, generator, torch.float32))
    rounds.done.copy_(torch.tensor([True, False, False]))
    pending.forget(torch.tensor([False, True, True]))
    rounds.length[1:] = 0
    pending.most = 0  # as where the host knows that rows began anew
    for _ in range(4):
        assert pending.has_room(1)
        fresh = make_round(rounds, ~rounds.done, generator, torch.float32)
        made.append(fresh.aux_hidden_states[1:, 0])
        pending.keep(fresh)
    (accepted_tokens,) = pending.drain()
    assert accepted_tokens.count.tolist() == [0, 4, 4]
    assert torch.equal(accepted_tokens.aux_hidden_states[1:], torch.stack(made, dim=1))


def test_a_cpu_counts_before_it_calls_a_row_full() -> None:
    """Rows come and go: what was kept of those that went takes no room."""
    pending, rounds = new_pending()
    generator, everyone = torch.Generator().manual_seed(0), torch.ones(B, dtype=torch.bool)
    for _ in range(PENDING * PATIENCE):
        assert pending.has_room(1)
        pending.keep(make_round(rounds, everyone, generator, torch.float32))
    assert not pending.has_room(1)
    pending.forget(everyone)
    assert pending.has_room(1) and pending.most == 1


@pytest.mark.parametrize("patience", [16, 1])
def test_a_text_that_ends_while_its_head_is_paused_costs_the_head_nothing(
    patience: int, target_of: Callable[[str], FrozenTarget]
) -> None:
    """On a CPU; where to read many tokens takes no longer than one, they are read whenever there are many."""
    target = target_of("llama")
    head = build_head("eagle3", {"aux_layer_ids": [0, 1, 2]}, target, torch.ones(target.vocab_size).long()).to(
        target.dtype
    )
    accepted_tokens, extend = [], head.extend

    def noted(state: object, observation: Observation) -> None:
        accepted_tokens.append(observation.missed)
        extend(state, observation)

    head.extend = noted
    engine = open_engine(target, head, "chain:2", max_length=192, adaptive=True)
    assert engine.candidates is not None
    engine.candidates.paused.pending.room = PENDING * patience
    engine.candidates.controller.note = lambda span: None  # type: ignore[method-assign]
    engine.candidates.controller.candidate = engine.candidates.controller.none
    engine.generate([Request([5, 6, 7], 150, ignore_eos=True)])
    assert accepted_tokens == ([False] if patience > 1 else [False, True, True])
