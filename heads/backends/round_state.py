"""The state of a batch between rounds, and what a round adds to it.

Letters: B rows, K depth, M = K + 1 tokens a round can emit, T tokens of a report.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoundState:
    """Decisions of a batch so far."""

    length: Tensor  # (B,) int64, tokens in the target's cache
    root: Tensor  # (B,) int64
    done: Tensor  # (B,) bool; rows without a request are done
    limit: Tensor  # (B,) int64, most tokens to emit
    heeds_eos: Tensor  # (B,) bool
    output: Tensor  # (B, capacity) int64, tokens emitted, the root included; padding after output_length
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
class CommitResult:
    """New tokens of a round; valid until the next."""

    tokens: Tensor  # (B, M + 1) int64, the root before the round, then what was emitted
    start: Tensor  # (B,) int64, tokens in the target's cache before it
    count: Tensor  # (B,) int64, tokens that came into it; 0 in rows that are done
