"""One round of speculative decoding: propose, verify, choose, accept, commit.

Everything lives in static tensors on the target's device and nothing waits for the host, so that a CUDA graph can
hold a round. The host may run any number of rounds ahead: a row that is done stays as it is.

State of row b: its first length[b] tokens are in the target's cache, the root is the next one (decided, not yet in
the cache). Node j goes to slot length + j at position length + depth_j; the token chosen after it has position length
+ depth_j + 1.

Letters: B rows, N nodes, K depth, M = K + 1 tokens a round can emit, E slots shown to attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.runtime.accept import Acceptance
from eval.runtime.hf import TargetStep
from eval.runtime.rules import Rule
from eval.runtime.sampling import RowSampling
from heads.base import Drafter, Observation
from heads.target import Features
from heads.tree import Proposal, TreeShape, ancestors
from heads.tree import is_chain as is_chain

Mark = Callable[[str], None]
"""Called after each phase of a round with its name: draft, verify, accept, commit."""


@dataclass(frozen=True)
class RoundState:
    """What a batch has decided so far."""

    length: Tensor  # (B,) int64, tokens in the target's cache
    root: Tensor  # (B,) int64
    done: Tensor  # (B,) bool; rows without a request are done
    limit: Tensor  # (B,) int64, most tokens to emit
    heeds_eos: Tensor  # (B,) bool
    output: Tensor  # (B, capacity) int64, tokens emitted, the root included; junk after output_length
    output_length: Tensor  # (B,) int64
    rounds: Tensor  # (B,) int64, rounds the row took part in
    accepted: Tensor  # (B, capacity) int64, by round: drafted tokens that the output took
    reached: Tensor  # (B, capacity) int64, by round: the deepest level put to the test, all levels above it accepted
    report: Tensor  # (B, 3 + T) int64: done, output_length, length and the last T tokens, as the last round left them

    @classmethod
    def new(cls, *, batch_size: int, capacity: int, depth: int, device: torch.device, rounds: int = 1) -> "RoundState":
        """Rows without requests; `capacity` is the most tokens a request emits; a report shows the tokens of `rounds`
        rounds."""
        B, M = batch_size, depth + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            length=zeros(B),
            root=zeros(B),
            done=~zeros(B, dtype=torch.bool),
            limit=zeros(B),
            heeds_eos=zeros(B, dtype=torch.bool),
            output=zeros(B, capacity + M),
            output_length=zeros(B),
            rounds=zeros(B),
            accepted=zeros(B, capacity + 1),
            reached=zeros(B, capacity + 1),
            report=zeros(B, 3 + min(M * rounds, capacity)),
        )


@dataclass(frozen=True)
class Decoder:
    """The parts a round works with."""

    step: TargetStep
    shape: TreeShape
    head: Drafter | None
    head_state: Any
    sampling: RowSampling
    rule: Rule
    eos: Tensor  # (number of them,) int64
    state: RoundState
    zeros: Tensor  # (B, 1) int64
    places: Tensor  # (M,) int64, 0 .. K
    pinned: int = 1
    """Nodes of a plain step, of which all but the root are padding."""

    @property
    def depth(self) -> int:
        """The most levels of what is verified."""
        return max(self.shape.depth, self.pinned - 1)

    def round(self, extent: int, mark: Mark = lambda phase: None) -> None:
        """Advance every row that is not done; attention sees `extent` slots, at least length + N of every row."""
        state, shape = self.state, self.shape
        proposal = self.propose()
        mark("draft")
        masked = is_chain(shape) or (self.step.kernels is not None and not self.rule.needs_law)
        above = None if masked else ancestors(proposal.parents, shape.depth)
        features = self.step.verify(proposal, above, state.length, extent, self.depth)
        positions = state.length[:, None] + 1 + proposal.depths  # (B, N)
        if self.rule.needs_law:
            consulted = self.rule.consult(self.step.logits(features.hidden), positions)
        else:
            consulted = self.step.choose(features.hidden, positions, self.sampling)  # (B, N)
        if self.pinned > 1:
            proposal, consulted = self.roots(), consulted[:, :1]
        mark("verify")
        acceptance = self.rule.accept(proposal, consulted, positions, above)
        mark("accept")
        self.commit(proposal, acceptance, features)
        mark("commit")

    def propose(self) -> Proposal:
        """The head's tree below each root; the root alone without a head."""
        if self.head is not None:
            return self.head.propose(self.head_state, self.rule.begin())
        if self.pinned == 1:
            return self.roots()
        B, depths = len(self.state.root), self.step.slot[: self.pinned].expand(len(self.state.root), -1)
        tokens = self.state.root[:, None].expand(B, self.pinned).contiguous()
        return Proposal(tokens, (depths - 1).clamp_min(0), depths, depths)

    def roots(self) -> Proposal:
        """The roots alone."""
        return Proposal(self.state.root[:, None], self.zeros, self.zeros, self.zeros)

    def commit(self, proposal: Proposal, acceptance: Acceptance, features: Features) -> None:
        """Take the accepted tokens into the state, cut at EOS and at the limit, and tell the head what became known."""
        state, emitted = self.state, acceptance.emitted  # (B, M)
        count = acceptance.accepted + 1
        kept, ended = self.cut(emitted, count)
        active = ~state.done
        kept = kept * active
        state.done.logical_or_(ended)
        going = torch.where(state.done, 0, count)

        if self.shape.depth > 0:
            self.record(proposal, acceptance.accepted, kept)
        state.output.scatter_(1, state.output_length[:, None] + self.places, emitted)
        state.output_length.add_(kept)
        state.rounds.add_(active)
        if self.head is not None:
            self.observe(acceptance, features, going)
        if not is_chain(self.shape):
            self.step.compact(state.length, acceptance)
        state.length.add_(going)
        # A row that is done may take any root: it is never read.
        state.root.copy_(emitted.gather(1, acceptance.accepted[:, None])[:, 0])
        self.publish()

    def publish(self) -> None:
        """Write the report."""
        state = self.state
        T = state.report.shape[1] - 3
        place = (state.output_length[:, None] - T + self.step.slot[:T]).clamp_min(0)
        facts = [state.done.long()[:, None], state.output_length[:, None], state.length[:, None]]
        state.report.copy_(torch.cat([*facts, state.output.gather(1, place)], dim=1))

    def cut(self, emitted: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the first count[b] tokens the output keeps, and whether it ends with them; (B,) each."""
        state = self.state
        room = state.limit - state.output_length
        kept = torch.minimum(count, room)
        ended = count >= room
        if len(self.eos):
            M = emitted.shape[1]
            is_eos = (emitted[..., None] == self.eos).any(dim=-1) & state.heeds_eos[:, None]  # (B, M)
            upto_eos = torch.where(is_eos, self.places + 1, M + 1).amin(dim=1)
            ended = ended | (upto_eos <= kept)
            kept = torch.minimum(kept, upto_eos)
        return kept, ended

    def record(self, proposal: Proposal, accepted: Tensor, kept: Tensor) -> None:
        """Note how deep the round came; one that the output's end cuts short tests only the levels the output shows."""
        state, K = self.state, self.shape.depth
        deepest = K if is_chain(self.shape) else proposal.depths.amax(dim=1)
        at = state.rounds[:, None]
        state.accepted.scatter_(1, at, torch.minimum(accepted, kept)[:, None])
        state.reached.scatter_(1, at, torch.minimum(accepted + 1, kept).clamp(max=deepest)[:, None])

    def observe(self, acceptance: Acceptance, features: Features, count: Tensor) -> None:
        """Hand the head the true features of the accepted path; count (B,) is 0 for rows that are done."""
        assert self.head is not None
        taps, hidden = features.taps, features.hidden
        if not is_chain(self.shape):  # a chain's path is its nodes in order
            path = acceptance.path[..., None]
            taps, hidden = (x.gather(1, path.expand(-1, -1, x.shape[-1])) for x in (taps, hidden))
        observation = Observation(
            tokens=torch.cat([self.state.root[:, None], acceptance.emitted], dim=1),
            taps=taps,
            hidden=hidden,
            start=self.state.length.clone(),
            count=count,
            nodes=acceptance.path,
        )
        self.head.observe(self.head_state, observation)
