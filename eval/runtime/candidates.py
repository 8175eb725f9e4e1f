"""One target and one head with several drafts: the decoders among which a controller chooses.

All share the target's cache, the head's state and the rounds' state. A candidate that drafts less is the same decoder
with another shape. A head that drafts nothing reads nothing: its pending tokens are kept (`eval.runtime.pending`),
and read when there is no more room or when drafting goes on; what is kept when a request ends is dropped.

Letters: B rows, K depth, R rounds of a span.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eval.runtime.adaptive import Controller, Span, candidates
from eval.runtime.judges import make_rule
from eval.runtime.pending import PendingStates
from eval.runtime.round import Decoder
from eval.runtime.state import Commit
from heads.base import Drafter, Observation, Pick
from heads.tree import ROOT_ONLY, Proposal, TreeShape, parse_shape


@dataclass
class PausedState:
    """State of a paused head."""

    pending: PendingStates
    head_state: Any
    zeros: Tensor  # (B, 1) int64


class PausedDrafter:
    """A head that drafts nothing while it is paused."""

    def __init__(self, head: Drafter) -> None:
        self.head, self.aux_layer_ids = head, head.aux_layer_ids

    def reset_rows(self, state: PausedState, rows: Tensor) -> None:
        state.pending.forget(rows)
        self.head.reset_rows(state.head_state, rows)

    def propose(self, state: PausedState, pick: Pick) -> Proposal:
        return Proposal(state.pending.rounds.root[:, None], state.zeros, state.zeros, state.zeros)

    def extend(self, state: PausedState, observation: Observation) -> None:
        if observation.nodes is None:  # a prompt, of rows that have just been reset
            self.head.extend(state.head_state, observation)
        else:
            state.pending.keep(observation)

    def catch_up(self, state: PausedState) -> None:
        """Let the head read the pending tokens."""
        for observation in state.pending.drain():
            self.head.extend(state.head_state, observation)


class Candidates:
    """Candidates of one decoder, and the controller that chooses among them."""

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.head is not None
        self.paused = PausedDrafter(decoder.head)
        self.paused_state = PausedState(PendingStates(decoder.state), decoder.head_state, decoder.zeros)
        shapes = [
            decoder.shape if str(decoder.shape) == name else parse_shape(name) for name in candidates(decoder.shape)
        ]
        self.candidates = [self._candidate(decoder, shape) for shape in shapes]
        self.controller = Controller(shapes)
        self.before = torch.zeros_like(decoder.state.rounds)

    def _candidate(self, decoder: Decoder, shape: TreeShape) -> Decoder:
        drafts = shape is not ROOT_ONLY
        head: Any = decoder.head if drafts else self.paused
        return replace(
            decoder,
            shape=shape,
            head=head,
            head_state=replace(decoder.head_state, shape=shape) if drafts else self.paused_state,
            rule=make_rule("match", shape, decoder.sampling, decoder.zeros.device),
            update=Commit(decoder.state, decoder.update.eos, shape.depth),
        )

    @property
    def idle(self) -> Decoder:
        """The candidate that drafts nothing. Prompts are read through it, which clears the pending tokens of their
        rows."""
        return self.candidates[-1]

    def begin(self, rounds: int) -> Decoder:
        """Return the candidate of the next rounds, at most PENDING of them, ready to run. Pending tokens are counted
        here, on the host."""
        candidate, pending = self.candidates[self.controller.candidate], self.paused_state.pending
        if candidate is not self.idle:
            self.paused.catch_up(self.paused_state)
            self.before.copy_(candidate.state.rounds)
        elif not pending.has_room(rounds):
            self.paused.catch_up(self.paused_state)
            pending.most = rounds
        return candidate

    def end(self, rounds: int, seconds: float) -> str:
        """Report the results of these rounds to the controller. Return the name of their draft."""
        candidate = self.candidates[self.controller.candidate]
        outcomes = () if candidate is self.idle else self._outcomes(candidate, rounds)
        self.controller.note(Span(rounds, seconds, *outcomes))
        return str(candidate.shape)

    def _outcomes(self, candidate: Decoder, rounds: int) -> Sequence[list[int]]:
        """Return, by depth, the tokens tested in the last rounds and the tokens accepted."""
        state = candidate.state
        indices = self.before[:, None] + torch.arange(rounds, device=self.before.device)  # (B, R)
        depth = torch.arange(1, candidate.shape.depth + 1, device=indices.device)
        took_part = (indices < state.rounds[:, None])[..., None]
        counts = [record.gather(1, indices)[..., None] >= depth for record in (state.reached, state.accepted)]
        tested, kept = torch.stack([(count & took_part).sum(dim=(0, 1)) for count in counts]).tolist()
        return tested, kept
