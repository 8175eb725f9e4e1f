"""One target and one head with several drafts: the decoders among which a controller chooses.

All share the target's cache, the head's state and the rounds' state. A rung that drafts less is the same decoder with
another shape. While nothing is drafted the head is told nothing: to read one token a round would cost a pass of its
weights for each. What it missed is kept, and read in one pass once there are `BACKLOG` tokens of it, or when drafting
goes on; what is kept when a request ends is dropped.

Letters: B rows, K depth, R rounds of a span.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eval.runtime.controller import Controller, Span, ladder
from eval.runtime.round import Decoder
from eval.runtime.rules import make_rule
from eval.runtime.state import RoundState, Settlement
from heads.base import Drafter, Observation, Pick
from heads.tree import ROOT_ONLY, Proposal, TreeShape, parse_shape

BACKLOG = 64
"""Tokens that a head reads at once after rounds without drafts."""


@dataclass
class Backlog:
    """What the head has not been told of each row."""

    rounds: RoundState
    head_state: Any
    zeros: Tensor  # (B, 1) int64
    tokens: Tensor  # (B, BACKLOG + 1) int64
    taps: Tensor  # (B, BACKLOG, L * D)
    hidden: Tensor  # (B, BACKLOG, D)
    count: Tensor  # (B,) int64
    most: int = 0
    """No row has more; known without asking the device."""


class Resting:
    """A head that drafts nothing for the time being."""

    def __init__(self, head: Drafter) -> None:
        self.head, self.taps = head, head.taps

    def new_state(self, decoder: Decoder) -> Backlog:
        """The backlog of a decoder's rows; the features' sizes show in the first observation."""
        zeros, head_state = decoder.zeros, decoder.head_state
        nothing = zeros.new_zeros(0)
        return Backlog(decoder.state, head_state, zeros, nothing, nothing, nothing, torch.zeros_like(zeros[:, 0]))

    def reset_rows(self, state: Backlog, rows: Tensor) -> None:
        state.count.masked_fill_(rows, 0)
        self.head.reset_rows(state.head_state, rows)

    def propose(self, state: Backlog, pick: Pick) -> Proposal:
        return Proposal(state.rounds.root[:, None], state.zeros, state.zeros, state.zeros)

    def observe(self, state: Backlog, observation: Observation) -> None:
        if observation.nodes is None:  # a prompt, of rows that have just been reset
            self.head.observe(state.head_state, observation)
            return
        if not len(state.tokens):
            self._allocate(state, observation)
        # A row that is done gets junk in a place that is not counted, or in its last: it is reset before it is read.
        at = state.count.clamp_max(BACKLOG - 1)[:, None]
        state.tokens.scatter_(1, torch.cat([at, at + 1], dim=1), observation.tokens)
        for kept, fresh in ((state.taps, observation.taps), (state.hidden, observation.hidden)):
            kept.scatter_(1, at[..., None].expand_as(fresh), fresh)
        state.count.add_(observation.count)

    def catch_up(self, state: Backlog) -> None:
        """Tell the head what it missed."""
        if state.most == 0:
            return
        M = 1 << (state.most - 1).bit_length()  # few shapes
        count = torch.where(state.rounds.done, 0, state.count)
        observation = Observation(
            tokens=state.tokens[:, : M + 1],
            taps=state.taps[:, :M],
            hidden=state.hidden[:, :M],
            start=state.rounds.length - count,
            count=count,
            nodes=None,
            missed=True,
        )
        self.head.observe(state.head_state, observation)
        state.count.zero_()
        state.most = 0

    def _allocate(self, state: Backlog, like: Observation) -> None:
        B = len(like.count)
        state.tokens = like.tokens.new_zeros(B, BACKLOG + 1)
        state.taps = like.taps.new_zeros(B, BACKLOG, like.taps.shape[2])
        state.hidden = like.hidden.new_zeros(B, BACKLOG, like.hidden.shape[2])


class Ladder:
    """The rungs of one decoder, and the controller that chooses among them."""

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.head is not None
        self.resting = Resting(decoder.head)
        self.backlog = self.resting.new_state(decoder)
        shapes = [decoder.shape if str(decoder.shape) == name else parse_shape(name) for name in ladder(decoder.shape)]
        self.rungs = [self._rung(decoder, shape) for shape in shapes]
        self.controller = Controller(shapes)
        self.before = torch.zeros_like(decoder.state.rounds)

    def _rung(self, decoder: Decoder, shape: TreeShape) -> Decoder:
        drafts = shape is not ROOT_ONLY
        head: Any = decoder.head if drafts else self.resting
        return replace(
            decoder,
            shape=shape,
            head=head,
            head_state=replace(decoder.head_state, shape=shape) if drafts else self.backlog,
            rule=make_rule("match", shape, decoder.sampling, decoder.zeros.device),
            settlement=Settlement(decoder.state, decoder.settlement.eos, shape.depth),
        )

    @property
    def idle(self) -> Decoder:
        """The rung that drafts nothing; prompts are read through it, which resets what is kept of their rows."""
        return self.rungs[-1]

    def begin(self, rounds: int) -> Decoder:
        """The rung of the next rounds, at most BACKLOG, ready. What is kept is counted here: rounds never ask."""
        rung = self.rungs[self.controller.rung]
        if rung is not self.idle:
            self.resting.catch_up(self.backlog)
            self.before.copy_(rung.state.rounds)
        else:
            if self.backlog.most + rounds > BACKLOG:
                self.resting.catch_up(self.backlog)
            self.backlog.most += rounds
        return rung

    def end(self, rounds: int, seconds: float) -> str:
        """Tell the controller what these rounds gave; -> the name of their draft."""
        rung = self.rungs[self.controller.rung]
        tested, kept = ([], []) if rung is self.idle else self._fates(rung, rounds)
        self.controller.note(Span(rounds, seconds, tested, kept))
        return str(rung.shape)

    def _fates(self, rung: Decoder, rounds: int) -> Sequence[list[int]]:
        """By depth, how many tokens were put to the test in the last rounds, and how many were accepted."""
        state = rung.state
        places = self.before[:, None] + torch.arange(rounds, device=self.before.device)  # (B, R)
        depth = torch.arange(1, rung.shape.depth + 1, device=places.device)
        took_part = (places < state.rounds[:, None])[..., None]
        counts = [record.gather(1, places)[..., None] >= depth for record in (state.reached, state.accepted)]
        tested, kept = torch.stack([(count & took_part).sum(dim=(0, 1)) for count in counts]).tolist()
        return tested, kept
