"""Whether the texts of a server are the target's: greedy ones are its choices, sampled ones are draws from its
distribution.

A token x_t that is drawn from p_t has an expected log-probability, minus the entropy of p_t, and so have other
functions f of the token. Over the tokens of many texts

    sum of f_t(x_t) - E f_t   has the variance   sum of Var f_t,

exactly, since each difference has mean 0 whatever came before it. Two functions are summed: the log-probability,
bounded below, so that one rare token or one beyond a filter's edge decides nothing; and whether the token is the
likeliest.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.records.figures_schema import CheckedDraws
from eval.runtime.distribution import RowSampling
from eval.runtime.sampling_params import Sampling
from heads.targets.frozen_target import FrozenTarget

CHECKED_TOKENS = 16
"""Tokens of the greedy answer that shows whether a server runs the target."""
FOREIGN = 2.0
"""A greedy token whose logit is further below the highest shows another target. Two dtypes of one model differ by
less."""
FLOOR = -10.0
"""Lower bound of a log-probability."""
DEVIATIONS = 3.5
"""Standard deviations up to which sampled texts are the target's. Honest ones exceed them once in 2,000 times."""
ROUNDING = 0.05
"""Difference that is allowed besides, as a share of the variance: that of a temperature 5% off. The dtypes of one model
differ by less."""
ROWS = 128
"""Rows of logits that are computed together."""


@dataclass
class Draws:
    """Sums over sampled tokens: of the bounded log-probability, and of the likeliest tokens among them."""

    tokens: int
    found: list[float]
    expected: list[float]
    variance: list[float]

    def excess(self) -> float:
        """Return the largest difference between a sum and its expectation, in units of what is allowed."""
        units = (-FLOOR, 1.0)
        return max(
            abs(found - expected) / (DEVIATIONS * math.sqrt(variance) + ROUNDING * variance + unit)
            for found, expected, variance, unit in zip(self.found, self.expected, self.variance, units, strict=True)
        )

    def record(self) -> CheckedDraws:
        means = [total / self.tokens for totals in (self.found, self.expected) for total in totals]
        error = math.sqrt(self.variance[0]) / self.tokens
        return CheckedDraws(
            tokens=self.tokens,
            log_probability=means[0],
            expected=means[2],
            error=error,
            likeliest=means[1],
            expected_likeliest=means[3],
        )


def logits_of(target: FrozenTarget, prompt: Sequence[int], text: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield logits (rows, V) of the tokens of a text after a prompt, with the index of the first one."""
    states = target.alone(torch.tensor([[*prompt, *text]], device=target.device))[0, -len(text) - 1 : -1]
    for first in range(0, len(text), ROWS):
        yield first, target.shared.lm_head(states[first : first + ROWS])


@torch.inference_mode()
def foreign_token(target: FrozenTarget, prompt: Sequence[int], text: Sequence[int]) -> str | None:
    """Return which token of a greedy answer shows that it is not the target's, or None."""
    worst = 0.0
    fault = None
    for first, logits in logits_of(target, prompt, text):
        given = torch.tensor(text[first : first + len(logits)], device=logits.device)
        gaps = logits.float().amax(dim=-1) - logits.float().gather(-1, given[:, None])[:, 0]
        at = int(gaps.argmax())
        if float(gaps[at]) > max(worst, FOREIGN):
            worst = float(gaps[at])
            best = int(logits[at].argmax())
            fault = f"token {text[first + at]} at place {first + at} has a logit {worst:.1f} below that of {best}"
    return fault


@torch.inference_mode()
def compare_draws(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> Draws:
    """Compare sampled texts, each after its prompt, with the target's distribution under a temperature above 0."""
    rows = RowSampling(1, target.device, target.vocab_size, target.start_token)
    found = torch.zeros(2, dtype=torch.float64)
    expected = torch.zeros_like(found)
    variance = torch.zeros_like(found)
    for prompt, text in zip(prompts, texts, strict=True):
        rows.set_row(0, sampling, prompt)
        for first, logits in logits_of(target, prompt, text):
            given = torch.tensor(text[first : first + len(logits)], device=logits.device)[:, None]
            counts = counts_before(text, first, len(logits), logits) if rows.penalised else None
            logp = rows.log_distribution(logits[None], counts)[0].double()
            values = torch.stack([logp.clamp_min(FLOOR), _at_likeliest(logp)])  # (2, rows, V)
            p = logp.exp()
            means = (p * values).sum(dim=-1)
            found += values.gather(-1, given.expand(2, -1, -1)).sum(dim=(1, 2)).cpu()
            expected += means.sum(dim=1).cpu()
            variance += ((p * values.square()).sum(dim=-1) - means.square()).clamp_min(0).sum(dim=1).cpu()
    return Draws(sum(map(len, texts)), found.tolist(), expected.tolist(), variance.tolist())


def counts_before(text: Sequence[int], first: int, number: int, like: Tensor) -> Tensor:
    """Return (1, number, V) how often a text has each token before its tokens from `first` on."""
    vocab_size = like.shape[-1]
    before = torch.tensor(text[:first], dtype=torch.int64, device=like.device).bincount(minlength=vocab_size)
    later = torch.tensor(text[first : first + number], device=like.device)
    each = torch.nn.functional.one_hot(later, vocab_size)
    return (before + each.cumsum(dim=0) - each)[None]


def _at_likeliest(logp: Tensor) -> Tensor:
    return torch.zeros_like(logp).scatter_(-1, logp.argmax(dim=-1, keepdim=True), 1.0)
