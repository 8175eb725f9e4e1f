"""Sampling settings of a request; `eval.runtime.distribution` chooses the tokens by them.

The command line reads these settings, so this file imports no torch.
"""

from dataclasses import dataclass

from heads.errors import UserError

COLDEST, HOTTEST = 1e-6, 1e6


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a request. Temperature 0 is greedy, and then the filters and the seed have no effect."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k likeliest tokens (lowest ids on ties); 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens until their mass reaches this share; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest; 0 keeps all."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST):
            raise UserError(
                f"temperature: expected 0 (greedy) or a number from {COLDEST} to {HOTTEST:.0f}, got {self.temperature}"
            )
        if not 0 <= self.top_k < 2**63:
            raise UserError(f"top_k: expected a count, or 0 to keep all tokens, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: expected a share above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p: expected a share from 0 to 1, got {self.min_p}")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed: expected an integer of at most 64 bits, got {self.seed}")
