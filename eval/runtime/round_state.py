"""Decided state of a batch between rounds, and the commit of a round's result to it.

Letters: B rows, N nodes, K depth, M tokens that a round can emit, at most K + 1, T tokens of a report.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoundState:
    """Decided state of a batch."""

    length: Tensor  # (B,) int64, tokens in the target's cache
    root: Tensor  # (B,) int64
    done: Tensor  # (B,) bool; rows without a request are done
    limit: Tensor  # (B,) int64, maximum number of tokens to emit
    stops_at_eos: Tensor  # (B,) bool
    output: Tensor  # (B, capacity) int64, tokens emitted, the root included; padding after output_length
    output_length: Tensor  # (B,) int64
    rounds: Tensor  # (B,) int64, rounds in which the row was active
    accepted: Tensor  # (B, capacity) int64, per round: number of draft tokens in the output
    reached: Tensor  # (B, capacity) int64, per round: the deepest level verified, all levels above it accepted
    copied: Tensor  # (B, capacity) bool, per round: True if the draft was copied from the text
    report: Tensor  # (B, 3 + T) int64: done, output_length, length and the last T tokens, after the last round

    @classmethod
    def new(cls, *, batch_size: int, capacity: int, depth: int, device: torch.device) -> "RoundState":
        """Return a state whose rows have no requests. `capacity`: maximum number of tokens that a request emits."""
        B = batch_size
        M = depth + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            length=zeros(B),
            root=zeros(B),
            done=~zeros(B, dtype=torch.bool),
            limit=zeros(B),
            stops_at_eos=zeros(B, dtype=torch.bool),
            output=zeros(B, capacity + M),
            output_length=zeros(B),
            rounds=zeros(B),
            accepted=zeros(B, capacity + 1),
            reached=zeros(B, capacity + 1),
            copied=zeros(B, capacity + 1, dtype=torch.bool),
            report=zeros(B, 3 + min(M, capacity)),
        )


@dataclass(frozen=True)
class CommitResult:
    """New tokens of a round."""

    tokens: Tensor  # (B, M + 1) int64, the root before the round, then the emitted tokens
    start: Tensor  # (B,) int64, tokens in the target's cache before the round
    count: Tensor  # (B,) int64, tokens added to the cache; 0 in rows that are done


class Commit:
    """Commit of the results of rounds of at most one depth to a state."""

    def __init__(self, state: RoundState, eos: Tensor, depth: int) -> None:
        """eos: any number of token ids, int64."""
        device = state.done.device
        self.state = state
        self.eos = eos
        self.depth = depth
        self.offsets = torch.arange(depth + 1, device=device)
        self.shown = torch.arange(state.report.shape[1] - 3, device=device)

    def __call__(
        self, accepted: Tensor, emitted: Tensor, depths: Tensor | None, copied: Tensor | None = None
    ) -> CommitResult:
        """Commit the accepted tokens to the state, cut at EOS and at the limit.

        accepted (B,), emitted (B, M): as in `Acceptance`; depths (B, N): of each tree's nodes, None if all trees have
        M - 1 levels; copied (B,): as in `Proposal`.
        """
        state = self.state
        count = accepted + 1
        emitted_count, ended = self.cut(emitted, count)
        active = ~state.done
        emitted_count = emitted_count * active
        state.done.logical_or_(ended)
        result = CommitResult(
            torch.cat([state.root[:, None], emitted], dim=1), state.length.clone(), torch.where(state.done, 0, count)
        )
        if self.depth > 0:  # if the output ends in the round, only the levels up to its end count
            index = state.rounds[:, None]
            state.accepted.scatter_(1, index, torch.minimum(accepted, emitted_count)[:, None])
            levels = emitted.shape[1] - 1 if depths is None else depths.amax(dim=1)
            state.reached.scatter_(1, index, torch.minimum(count, emitted_count).clamp(max=levels)[:, None])
            if copied is not None:
                state.copied.scatter_(1, index, copied[:, None])
        state.output.scatter_(1, state.output_length[:, None] + self.offsets[: emitted.shape[1]], emitted)
        state.output_length.add_(emitted_count)
        state.rounds.add_(active)
        state.length.add_(result.count)
        # A row that is done may have any root, since it is never read.
        state.root.copy_(emitted.gather(1, accepted[:, None])[:, 0])
        self.write_report()
        return result

    def cut(self, emitted: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many of the first count[b] tokens the output takes, and True if the output ends with them; (B,)
        each."""
        state = self.state
        room = state.limit - state.output_length
        taken = torch.minimum(count, room)
        ended = count >= room
        if len(self.eos):
            M = emitted.shape[1]
            is_eos = (emitted[..., None] == self.eos).any(dim=-1) & state.stops_at_eos[:, None]  # (B, M)
            upto_eos = torch.where(is_eos, self.offsets[:M] + 1, M + 1).amin(dim=1)
            ended = ended | (upto_eos <= taken)
            taken = torch.minimum(taken, upto_eos)
        return taken, ended

    def write_report(self) -> None:
        state = self.state
        index = (state.output_length[:, None] - len(self.shown) + self.shown).clamp_min(0)
        facts = [state.done.long()[:, None], state.output_length[:, None], state.length[:, None]]
        state.report.copy_(torch.cat([*facts, state.output.gather(1, index)], dim=1))
