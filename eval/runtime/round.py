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

from torch import Tensor

from eval.runtime.distribution import RowSampling
from eval.runtime.judges import Rule
from eval.runtime.state import Commit
from eval.runtime.target_step import TargetStep
from heads.backends.round_state import RoundState
from heads.backends.slot_mapping import ancestors
from heads.backends.triton.accept import take_path
from heads.base import Drafter, Observation
from heads.target.frozen import Features
from heads.tree import Acceptance, Proposal, TreeShape, is_chain

Mark = Callable[[str], None]
"""Called after each phase of a round with its name: draft, verify, accept, commit."""


@dataclass(frozen=True)
class Decoder:
    """Parts of a round."""

    step: TargetStep
    shape: TreeShape
    head: Drafter | None
    head_state: Any
    sampling: RowSampling
    rule: Rule
    state: RoundState
    update: Commit
    zeros: Tensor  # (B, 1) int64
    pinned: int = 1
    """Number of nodes of a plain step, all but the root of them padding."""

    @property
    def depth(self) -> int:
        """Maximum number of levels to verify."""
        return max(self.shape.depth, self.pinned - 1)

    def round(self, extent: int, mark: Mark = lambda phase: None) -> None:
        """Advance every row that is not done; attention sees `extent` slots, at least length + N of every row."""
        state, shape = self.state, self.shape
        proposal = self.propose()
        mark("draft")
        reads = self.step.decoder.reads_masks or self.rule.needs_distribution
        above = ancestors(proposal.parents, shape.depth) if reads and not is_chain(shape) else None
        features = self.step.verify(proposal, above, state.length, extent, self.depth)
        positions = state.length[:, None] + 1 + proposal.depths  # (B, N)
        if self.rule.needs_distribution:
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
        """Return the head's tree below each root; the root alone without a head."""
        if self.head is not None:
            return self.head.propose(self.head_state, self.rule.begin())
        if self.pinned == 1:
            return self.roots()
        B, depths = len(self.state.root), self.step.slot[: self.pinned].expand(len(self.state.root), -1)
        tokens = self.state.root[:, None].expand(B, self.pinned).contiguous()
        return Proposal(tokens, (depths - 1).clamp_min(0), depths, depths)

    def roots(self) -> Proposal:
        """Return the roots alone."""
        return Proposal(self.state.root[:, None], self.zeros, self.zeros, self.zeros)

    def commit(self, proposal: Proposal, acceptance: Acceptance, features: Features) -> None:
        """Take the accepted tokens into the state, cut at EOS and at the limit, and let the head read the new
        tokens."""
        chain = is_chain(self.shape)
        result = self.update(acceptance.accepted, acceptance.emitted, None if chain else proposal.depths)
        if not chain:
            self.step.compact(result.start, acceptance)
        if self.head is None:
            return
        aux_hidden_states, hidden = features.aux_hidden_states, features.hidden
        if not chain:  # a chain's path is its nodes in order
            aux_hidden_states, hidden = take_path(aux_hidden_states, hidden, acceptance.path)
        observation = Observation(
            tokens=result.tokens,
            aux_hidden_states=aux_hidden_states,
            hidden=hidden,
            start=result.start,
            count=result.count,
            nodes=acceptance.path,
        )
        self.head.extend(self.head_state, observation)
