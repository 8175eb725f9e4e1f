"""What a resting head is told later is what was observed: every token once, in order, whoever kept it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eval.runtime import pending as module
from eval.runtime.engine import Engine, Request
from eval.runtime.pending import BACKLOG, PATIENCE, Backlog
from heads.backends.cpu import pending as cpu
from heads.backends.round_state import RoundState
from heads.base import Observation
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from heads.tree import parse_shape

B = 3
Known = list[list[tuple[int, float, float]]]
"""By row: each token, and the first value of its taps and of its hidden state."""


def new_backlog(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Backlog, RoundState]:
    if not compiler:
        monkeypatch.setattr(cpu, "load", lambda: None)
    elif cpu.load() is None:
        pytest.skip("no C compiler")
    rounds = RoundState.new(batch_size=B, capacity=2000, depth=2, device=torch.device("cpu"))
    rounds.done.fill_(False)
    return Backlog(rounds), rounds


def make_round(rounds: RoundState, live: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Observation:
    """A round of plain decoding, in which the rows that are live (B,) go on."""
    tokens = torch.cat([rounds.root[:, None], torch.randint(1, 99, (B, 1), generator=generator)], dim=1)
    taps, hidden = torch.randn(B, 1, 6, generator=generator), torch.randn(B, 1, 4, generator=generator)
    start = rounds.length.clone()
    rounds.root.copy_(tokens[:, 1])
    rounds.length.add_(live)
    return Observation(tokens, taps.to(dtype), hidden.to(dtype), start, live.long(), torch.zeros(B, 1).long())


def take(told: Observation, known: Known) -> None:
    M = told.tokens.shape[1] - 1
    assert told.missed and told.nodes is None and told.taps.shape[1] == told.hidden.shape[1] == M <= BACKLOG
    for row, (start, count) in enumerate(zip(told.start.tolist(), told.count.tolist(), strict=True)):
        if count:
            assert start == len(known[row]), "no gap, and nothing twice"
        for j in range(count):
            place = float(told.taps[row, j, 0]), float(told.hidden[row, j, 0])
            known[row].append((int(told.tokens[row, j]), *place))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiler", [True, False])
def test_all_that_was_kept_is_told_once(compiler: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    backlog, rounds = new_backlog(compiler, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    made: Known = [[] for _ in range(B)]
    known: Known = [[] for _ in range(B)]
    for rest in (1, 5, BACKLOG, 3 * BACKLOG + 7, 2):
        for _ in range(rest):
            if not backlog.has_room(1):
                for told in backlog.tell():
                    take(told, known)
                assert backlog.has_room(1)
            live = torch.rand(B, generator=generator) < torch.tensor([1.0, 0.6, 0.9])
            fresh = make_round(rounds, live, generator, dtype)
            for row in live.nonzero()[:, 0].tolist():
                place = float(fresh.taps[row, 0, 0]), float(fresh.hidden[row, 0, 0])
                made[row].append((int(fresh.tokens[row, 0]), *place))
            backlog.keep(fresh)
        for told in backlog.tell():
            take(told, known)
        assert known == made
    assert not list(backlog.tell())


@pytest.mark.parametrize("compiler", [True, False])
def test_rows_that_ended_or_began_anew_are_not_told_of(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backlog, rounds = new_backlog(compiler, monkeypatch)
    generator, everyone = torch.Generator().manual_seed(0), torch.ones(B, dtype=torch.bool)
    for _ in range(3):
        assert backlog.has_room(1)
        backlog.keep(make_round(rounds, everyone, generator, torch.float32))
    rounds.done[0] = True
    backlog.forget(torch.tensor([False, True, False]))
    rounds.length[1] = 20
    assert backlog.has_room(1)
    backlog.keep(make_round(rounds, ~rounds.done, generator, torch.float32))
    (told,) = backlog.tell()
    assert told.count.tolist() == [0, 1, 4]
    assert told.start.tolist()[1:] == [20, 0]


@pytest.mark.parametrize("compiler", [True, False])
def test_a_full_row_that_is_done_harms_no_other(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG", 4)
    monkeypatch.setattr(module, "PATIENCE", 1)
    backlog, rounds = new_backlog(compiler, monkeypatch)
    generator, everyone = torch.Generator().manual_seed(0), torch.ones(B, dtype=torch.bool)
    made = []
    for _ in range(4):
        assert backlog.has_room(1)
        backlog.keep(make_round(rounds, everyone, generator, torch.float32))
    rounds.done.copy_(torch.tensor([True, False, False]))
    backlog.forget(torch.tensor([False, True, True]))
    rounds.length[1:] = 0
    backlog.most = 0  # as where the host knows that rows began anew
    for _ in range(4):
        assert backlog.has_room(1)
        fresh = make_round(rounds, ~rounds.done, generator, torch.float32)
        made.append(fresh.taps[1:, 0])
        backlog.keep(fresh)
    (told,) = backlog.tell()
    assert told.count.tolist() == [0, 4, 4]
    assert torch.equal(told.taps[1:], torch.stack(made, dim=1))


def test_a_cpu_counts_before_it_calls_a_row_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come and go: what was kept of those that went takes no room."""
    backlog, rounds = new_backlog(True, monkeypatch)
    generator, everyone = torch.Generator().manual_seed(0), torch.ones(B, dtype=torch.bool)
    for _ in range(BACKLOG * PATIENCE):
        assert backlog.has_room(1)
        backlog.keep(make_round(rounds, everyone, generator, torch.float32))
    assert not backlog.has_room(1)
    backlog.forget(everyone)
    assert backlog.has_room(1) and backlog.most == 1


@pytest.mark.parametrize("compiler", [True, False])
def test_a_text_that_ends_while_its_head_rests_costs_the_head_nothing(
    compiler: bool, target_of: Callable[[str], FrozenTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU; where to read many tokens takes no longer than one, they are read whenever there are many."""
    target = target_of("llama")
    if not compiler:
        monkeypatch.setattr(cpu, "load", lambda: None)
    elif cpu.load() is None:
        pytest.skip("no C compiler")
    head = build_head("eagle3", {"taps": [0, 1, 2]}, target, torch.ones(target.vocab_size).long()).to(target.dtype)
    told, observe = [], head.observe

    def noted(state: object, observation: Observation) -> None:
        told.append(observation.missed)
        observe(state, observation)

    monkeypatch.setattr(head, "observe", noted)
    engine = Engine(target, head, shape=parse_shape("chain:2"), max_length=192, adaptive=True)
    assert engine.ladder is not None
    monkeypatch.setattr(engine.ladder.controller, "note", lambda span: None)
    engine.ladder.controller.rung = engine.ladder.controller.none
    engine.generate([Request([5, 6, 7], 150, ignore_eos=True)])
    assert told == ([False] if compiler else [False, True, True])
