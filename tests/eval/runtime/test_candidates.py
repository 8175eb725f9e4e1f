"""Drafts that change from round to round change no token, and a head that was paused knows all it missed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from eval.runtime.adaptive import Controller, Span
from eval.runtime.engine import Engine, Output, Request
from eval.runtime.round import read_prompts
from eval.runtime.sampling import Sampling
from heads.target.frozen import FrozenTarget
from tests.small_targets import make_drafter, open_engine
from tests.waiting import NoWaiting

TargetOf = Callable[[str], FrozenTarget]
HeadType = Callable[..., Any]
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, seed=3))
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"aux_layer_ids": [1, 2, 3]},
    "mtp": {"num_modules": 2, "depth": 3},
    "medusa": {"depth": 5},
    "draft": {"layers": [0, 2]},
    "lookup:2": {},
    "early_exit:2": {},
    "dflash2": {"aux_layer_ids": [1, 2], "num_layers": 2, "selector_rank": 4, "block_size": 6, "mask_token_id": 5},
    "dspark": {"aux_layer_ids": [1, 2], "num_layers": 2, "markov_rank": 4, "block_size": 4, "mask_token_id": 5},
}


@dataclass
class Restless(Controller):
    """Goes to any candidate at any time."""

    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def note(self, span: Span) -> None:
        super().note(span)
        if self.chance.random() < 0.5:
            self.spans.clear()
            self._change_to(self.chance.randrange(len(self.shapes)))

    def length(self, confidence: np.ndarray) -> int:
        return min(self.chance.randrange(1, 5), len(confidence[0]))


def make_restless(engine: Engine, block: int, room: int) -> Engine:
    """`room`: states of a paused head that are kept, read `block` of them at once."""
    assert engine.candidates is not None
    pending = engine.candidates.paused.pending
    pending.block, pending.room = block, room
    engine.candidates.controller = Restless(engine.candidates.controller.shapes)
    return engine


def make_requests(prompts: Sequence[Sequence[int]]) -> list[Request]:
    """Requests of either sampling, of different lengths."""
    return [Request(p, 30 - 4 * (i % 3), SAMPLINGS[i % 2], ignore_eos=i % 3 > 0) for i, p in enumerate(prompts)]


def texts(outputs: Sequence[Output]) -> list[tuple[list[int], str]]:
    return [(output.tokens, output.finish_reason) for output in outputs]


@pytest.mark.parametrize("poll_interval", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_changes_whatever_is_drafted(
    kind: str, batch_size: int, poll_interval: int, target_of: TargetOf, prompts: list[list[int]]
) -> None:
    target = target_of("llama")
    requests = make_requests(prompts[:8])
    plain = open_engine(target, None, batch_size=batch_size, max_length=192).generate(requests)
    engine = open_engine(
        target,
        make_drafter(kind, target, **KINDS[kind]),
        "chain:4",
        batch_size=batch_size,
        max_length=192,
        poll_interval=poll_interval,
        adaptive=True,
    )
    outputs = make_restless(engine, 4, 8).generate(requests)
    assert texts(outputs) == texts(plain)
    assert len(engine.timings.candidates) >= 3
    assert sum(engine.timings.candidates.values()) == engine.timings.rounds
    for output in outputs:
        assert output.rounds == len(output.accepted) == len(output.reached)
        assert sum(output.emitted()) == len(output.tokens) - 1
        assert all(a <= r <= min(a + 1, 4) for a, r in zip(output.accepted, output.reached, strict=True))


@pytest.mark.parametrize("shape", ["chain:5", "tree:3x3x9"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_what_the_head_is_given_has_no_gaps(
    shape: str, batch_size: int, target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]
) -> None:
    """The scripted head compares with the target's own features whatever it observes, and where."""
    target = target_of("llama")
    requests = make_requests(prompts)
    plain = open_engine(target, None, batch_size=batch_size, max_length=192).generate(requests)
    known = [[*request.prompt, *output.tokens] for request, output in zip(requests, plain, strict=True)]
    head = scripted_head(target, known, right=0.6)
    engine = open_engine(target, head, shape, batch_size=batch_size, max_length=192, adaptive=True)
    make_restless(engine, 4, 64)
    for _ in range(2):  # rows are used again
        assert texts(engine.generate(requests)) == texts(plain)
    assert head.observations > 50


@pytest.mark.parametrize("patience", [16, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_was_paused_drafts_as_if_it_had_not(
    kind: str, patience: int, target_of: TargetOf, prompts: list[list[int]]
) -> None:
    """Both drafted the same wherever both drafted."""
    target = target_of("llama")
    head = make_drafter(kind, target, **KINDS[kind])
    propose = head.propose
    drafts: dict[int, list[int]] = {}

    def noted(state: Any, pick: Any) -> Any:
        proposal = propose(state, pick)
        drafts[int(state.length[0])] = proposal.tokens[0].tolist()
        return proposal

    head.propose = noted
    request = Request(prompts[4], 120, SAMPLINGS[1], ignore_eos=True)
    open_engine(target, head, "chain:2", max_length=192).generate([request])
    always, drafts = drafts, {}
    engine = open_engine(target, head, "chain:4", max_length=192, adaptive=True)
    make_restless(engine, 8, 8 * patience).generate([request])
    common = sorted(always.keys() & drafts.keys())
    assert len(common) > 15
    assert {len(drafts[at]) for at in common} == {2, 3, 4, 5}, "chains of all lengths, and their roots"
    if kind in (
        "dflash",
        "dflash2",
        "dspark",
    ):  # the rows of a block see one another: one of another length drafts other tokens
        common = [at for at in common if len(drafts[at]) == len(always[at])]
        assert len(common) > 3
    for at in common:
        depth = min(len(always[at]), len(drafts[at]))
        assert drafts[at][:depth] == always[at][:depth], at


class FakeClock:
    """Seconds that pass with what is asked of target and head, and not otherwise."""

    def __init__(self, engine: Engine) -> None:
        self.now = 0.0
        step: Any = engine.decoder.step
        verify = step.verify
        head: Any = engine.head

        def timed_verify(proposal: Any, *rest: Any) -> Any:
            nodes = proposal.tokens.shape[1]
            self.now += 1.0 + (0.2 + 0.02 * nodes if nodes > 1 else 0.0)
            return verify(proposal, *rest)

        step.verify = timed_verify
        engine.clock = lambda: self.now  # type: ignore[method-assign]
        if head is not None:
            propose, extend = head.propose, head.extend

            def timed_propose(state: Any, pick: Any) -> Any:
                self.now += 0.1 * state.shape.depth
                return propose(state, pick)

            def timed_extend(state: Any, observation: Any) -> None:
                self.now += 0.05 + 0.002 * observation.hidden.shape[1]
                extend(state, observation)

            head.propose = timed_propose
            head.extend = timed_extend


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_useless_head_ends_at_plain_decoding_and_a_good_one_stays(
    batch_size: int, target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]
) -> None:
    target = target_of("llama")
    requests = [Request(p, 150, SAMPLINGS[i % 2], ignore_eos=True) for i, p in enumerate(prompts[3:6])]
    plain = open_engine(target, None, batch_size=batch_size, max_length=192)
    FakeClock(plain)
    expected = plain.generate(requests)
    known = [[*request.prompt, *output.tokens] for request, output in zip(requests, expected, strict=True)]
    speedups, shares = [], []
    for right in (0.0, 0.9):
        head = scripted_head(target, known, right=right, aux_layer_ids=())
        head.check_features = lambda *observed: None
        engine = open_engine(target, head, "chain:4", batch_size=batch_size, max_length=192, adaptive=True)
        FakeClock(engine)
        assert texts(engine.generate(requests)) == texts(expected)
        speedups.append(plain.timings.decode_seconds / engine.timings.decode_seconds)
        shares.append(engine.timings.candidates)
    assert speedups[0] > 0.95
    assert shares[0]["none"] > 0.85 * sum(shares[0].values())
    assert speedups[1] > 1.8
    assert shares[1]["chain:4"] > 0.7 * sum(shares[1].values())


@pytest.mark.usefixtures("gpu_steps")
def test_neither_pausing_nor_catching_up_waits_for_the_host(target_of: TargetOf) -> None:
    target = target_of("llama")
    requests = [Request([5, 6, 7], 40, sampling, ignore_eos=True) for sampling in SAMPLINGS]
    head = make_drafter("eagle3", target, **KINDS["eagle3"])
    engine = open_engine(target, head, "chain:3", batch_size=2, max_length=128, adaptive=True)
    candidates = engine.candidates
    assert candidates is not None
    candidates.paused.pending.may_ask = False  # as on a GPU
    with torch.inference_mode():
        read_prompts(candidates.idle, dict(enumerate(requests)))
        with NoWaiting():
            for candidate in (3, 3, 0, 3, 1):
                candidates.controller.candidate = candidate
                candidates.begin(1).round(128)
        assert torch.equal(engine.decoder.head_state.length, engine.decoder.state.length)
