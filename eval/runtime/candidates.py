"""Candidates for adaptive drafting: one decoder per draft, among which a controller chooses.

All candidates share the target's cache, the head's state and the rounds' state. A candidate that drafts less is the
same decoder with another shape. While nothing is drafted, the head reads nothing: tokens and hidden states are kept as
pending. The head reads them when their buffer is full or when drafting resumes. They are dropped when the request ends.

Reading one token per round would cost one pass over the head's weights each time. A GPU reads `PENDING` tokens in the
time of one, so it keeps that many. A CPU pays for each token whenever it reads it, so it keeps many more: the request
may end before they are needed.

Letters: B rows, K depth, R rounds of a span, S tokens kept of each row, M of them read at once.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eval.runtime.acceptance import make_rule
from eval.runtime.adaptive import Controller, Span, candidates
from eval.runtime.round import Decoder
from heads.backends.torch.commit import RoundState
from heads.base import Observation, Pick
from heads.tree import ROOT_ONLY, Proposal, TreeShape, is_chain, parse_shape

PENDING = 64
"""Maximum number of pending tokens that a head reads at once: a power of two."""
PATIENCE = 16
"""Ratio of the pending tokens kept on a CPU to PENDING."""


def pending_room(on_host: bool) -> int:
    """Return the maximum number of pending tokens of a row."""
    return PENDING * PATIENCE if on_host else PENDING


class PendingStates:
    """Pending tokens of every row of a batch, with their hidden states."""

    def __init__(self, rounds: RoundState, *, on_host: bool) -> None:
        """`rounds`: state of the rows. `on_host`: as `heads.backends.base.Backend.on_host`; if True, reading a tensor
        does not wait for a device. Buffers are allocated at the first observation, which shows the features' sizes."""
        self.rounds, self.may_ask = rounds, on_host
        self.room, self.block = pending_room(on_host), PENDING  # S, and the most of M
        self.count = torch.zeros_like(rounds.length)  # (B,)
        self.most = 0
        """Upper bound on the pending tokens of a row, known without asking the device."""
        self.tokens = self.aux_hidden_states = self.hidden = (
            self.count
        )  # (B, S + 1), (B, S, L * D) and (B, S, D), once allocated

    def allocate(self, like: Observation) -> None:
        """Allocate buffers for features of the sizes and types of `like`."""
        B, S = len(self.count), self.room
        self.tokens = like.tokens.new_zeros(B, S + 1)
        self.aux_hidden_states, self.hidden = (
            fresh.new_zeros(B, S, fresh.shape[2]) for fresh in (like.aux_hidden_states, like.hidden)
        )

    def forget(self, rows: Tensor) -> None:
        """Drop the pending tokens of some rows (B,) bool."""
        self.count.masked_fill_(rows, 0)

    def keep(self, observation: Observation) -> None:
        """Add a round that drafted nothing: one token of each row."""
        if self.tokens is self.count:
            self.allocate(observation)
        aux_hidden_states, hidden = observation.aux_hidden_states, observation.hidden
        # A row that is done gets padding, after its counted tokens or over the last one: it is reset before it is read.
        at = self.count.clamp_max(self.room - 1)[:, None]
        self.tokens.scatter_(1, torch.cat([at, at + 1], dim=1), observation.tokens)
        self.aux_hidden_states.scatter_(1, at[..., None].expand_as(aux_hidden_states), aux_hidden_states)
        self.hidden.scatter_(1, at[..., None].expand_as(hidden), hidden)
        self.count.add_(observation.count)

    def has_room(self, rounds: int) -> bool:
        """Return True if every row has room for `rounds` more tokens, and then reserve it."""
        if self.most + rounds > self.room and self.may_ask:
            self.most = int(self.live().max())  # rows start and end
        if self.most + rounds > self.room:
            return False
        self.most += rounds
        return True

    def live(self) -> Tensor:
        """Return (B,) int64, the number of pending tokens of each row; 0 for rows that are done."""
        return torch.where(self.rounds.done, 0, self.count)

    def drain(self) -> Iterator[Observation]:
        """Yield all pending tokens, the oldest first, at most `block` per row at once, and clear them."""
        if self.most == 0:
            return
        count = self.live()
        start = self.rounds.length - count
        most = int(count.max()) if self.may_ask else self.most
        for first in range(0, most, self.block):
            M = min(1 << (most - first - 1).bit_length(), self.block)  # few shapes
            yield Observation(
                tokens=self.tokens[:, first : first + M + 1],
                aux_hidden_states=self.aux_hidden_states[:, first : first + M],
                hidden=self.hidden[:, first : first + M],
                start=start + first,
                count=(count - first).clamp(0, M),
                nodes=None,
                missed=True,
            )
        self.count.zero_()
        self.most = 0


class PausedDrafter:
    """Drafter that proposes nothing and keeps tokens as pending for its head. It uses the head's state and ignores the
    `state` arguments."""

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.head is not None
        self.head, self.head_state, self.zeros = decoder.head, decoder.head_state, decoder.zeros
        self.aux_layer_ids = decoder.head.aux_layer_ids
        self.pending = PendingStates(decoder.state, on_host=decoder.backend.on_host)

    def reset_rows(self, state: Any, rows: Tensor) -> None:
        self.pending.forget(rows)
        self.head.reset_rows(self.head_state, rows)

    def propose(self, state: Any, pick: Pick) -> Proposal:
        return Proposal(self.pending.rounds.root[:, None], self.zeros, self.zeros, self.zeros)

    def extend(self, state: Any, observation: Observation) -> None:
        if observation.nodes is None:  # a prompt, in rows that have just been reset
            self.head.extend(self.head_state, observation)
        else:
            self.pending.keep(observation)

    def catch_up(self) -> None:
        """Let the head read the pending tokens."""
        for observation in self.pending.drain():
            self.head.extend(self.head_state, observation)


class Candidates:
    """Candidates of one decoder, and the controller that chooses among them."""

    def __init__(self, decoder: Decoder) -> None:
        self.paused = PausedDrafter(decoder)
        shapes = [
            decoder.shape if str(decoder.shape) == name else parse_shape(name) for name in candidates(decoder.shape)
        ]
        self.candidates = [self._candidate(decoder, shape) for shape in shapes]
        self.controller = Controller(shapes)
        self.before = torch.zeros_like(decoder.state.rounds)
        self.chains = {
            depth: self._candidate(decoder, parse_shape(f"chain:{depth}")) for depth in range(1, decoder.shape.depth)
        }
        """Decoders for chains of which only a part is verified, by the length of that part."""
        self.confidences: list[tuple[int, Tensor]] = []
        """Number of tokens verified and confidence (B, K) of the draft, of each round since `begin`."""

    def shorten(self, decoder: Decoder, proposal: Proposal) -> tuple[Decoder, Proposal]:
        """Cut off the part of a draft that is not worth verifying: `Decoder.shorten`, based on the draft's confidence
        and the controller's measured times."""
        if proposal.confidence is None:
            return decoder, proposal
        live = ~decoder.state.done
        rows = proposal.confidence[live] if bool(live.any()) else proposal.confidence
        length = self.controller.length(rows.numpy())
        self.confidences.append((length, proposal.confidence))
        if length == decoder.shape.depth:
            return decoder, proposal
        parts = (proposal.tokens, proposal.parents, proposal.depths, proposal.scores)
        return self.chains[length], Proposal(*(part[:, : length + 1].contiguous() for part in parts))

    def _candidate(self, decoder: Decoder, shape: TreeShape) -> Decoder:
        drafts = shape is not ROOT_ONLY
        head: Any = decoder.head if drafts else self.paused
        return replace(
            decoder,
            shape=shape,
            head=head,
            head_state=replace(decoder.head_state, shape=shape) if drafts else None,
            rule=make_rule("match", shape, decoder.sampling, decoder.backend),
            update=decoder.backend.commit(decoder.state, decoder.update.eos, shape.depth),
            # Not on a device: a graph captures a whole round, and without a graph the host would wait for the draft.
            shorten=self.shorten if decoder.backend.on_host and is_chain(shape) and shape.depth > 1 else None,
        )

    @property
    def idle(self) -> Decoder:
        """Candidate that drafts nothing. Prompts are read through it, which clears the pending tokens of their rows."""
        return self.candidates[-1]

    def begin(self, rounds: int) -> Decoder:
        """Return the candidate for the next `rounds` rounds (at most PENDING), ready to run. Pending tokens are counted
        here, on the host."""
        candidate, pending = self.candidates[self.controller.candidate], self.paused.pending
        self.confidences.clear()
        if candidate is not self.idle:
            self.paused.catch_up()
            self.before.copy_(candidate.state.rounds)
        elif not pending.has_room(rounds):
            self.paused.catch_up()
            pending.most = rounds
        return candidate

    def end(self, rounds: int, seconds: float) -> str:
        """Report the results of the rounds since `begin` to the controller. Return the name of their draft."""
        candidate = self.candidates[self.controller.candidate]
        if candidate is self.idle:
            self.controller.note(Span(rounds, seconds))
        else:
            self.controller.note(self._outcomes(candidate, rounds, seconds))
        return str(candidate.shape)

    def _outcomes(self, candidate: Decoder, rounds: int, seconds: float) -> Span:
        """Return the measurements of the last rounds, with tokens tested and accepted at each depth. If all verified
        tokens of a shortened chain were accepted, the next token counts as tested although it was not verified."""
        state = candidate.state
        indices = self.before[:, None] + torch.arange(rounds, device=self.before.device)  # (B, R)
        depth = torch.arange(1, candidate.shape.depth + 1, device=indices.device)
        took_part = (indices < state.rounds[:, None])[..., None]
        reached, accepted = (record.gather(1, indices)[..., None] for record in (state.reached, state.accepted))
        kept = (accepted >= depth) & took_part  # (B, R, K)
        tested = (reached >= depth) & took_part
        length, foreseen = None, 0.0
        if self.confidences:
            lengths = torch.tensor([verified for verified, _ in self.confidences])
            length = float(lengths.double().mean())
            foreseen = float((torch.stack([made for _, made in self.confidences], 1) * tested).sum())
            tested |= (accepted == lengths[:, None]) & (depth == lengths[:, None] + 1) & took_part
        tests, passes = torch.stack([tested.sum(dim=(0, 1)), kept.sum(dim=(0, 1))]).tolist()
        return Span(rounds, seconds, tests, passes, length, foreseen)
