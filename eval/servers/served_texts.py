"""Whether the texts of a server are the target's: greedy ones are its choices, sampled ones are draws from its
distribution.

A token x_t that is drawn from p_t has an expected log-probability, minus the entropy of p_t, and so have other
functions f of the token. Over the tokens of many texts

    sum of f_t(x_t) - E f_t   has the variance   sum of Var f_t,

exactly, since each difference has mean 0 whatever came before it. Two functions are summed: the log-probability,
bounded below, so that one rare token or one beyond a filter's edge decides nothing; and whether the token is the
likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eval.data.prompts import Prompt
from eval.measure.figures import token_at, top_two_margins
from eval.records.figures_schema import CheckedDraws, Divergence, Exact, Flip
from eval.records.measure_settings import BenchSettings
from eval.runtime.engine import Engine, EngineOptions
from eval.runtime.near_ties import (
    CHOICES,
    FAR,
    counts_before,
    find_mismatches,
    first_difference,
    own_states,
    target_sampling,
)
from eval.runtime.request import Request
from eval.runtime.sampling_params import Sampling
from heads.targets.frozen_target import FrozenTarget

if TYPE_CHECKING:
    from eval.servers.engine_client import Answer, EngineServer

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


@torch.inference_mode()
def foreign_token(target: FrozenTarget, prompt: Sequence[int], text: Sequence[int]) -> str | None:
    """Return which token of a greedy answer, of about `CHECKED_TOKENS`, shows that it is not the target's, or None."""
    (states,) = own_states(target, [(Request(prompt, len(text)), text)])
    logits = target.shared.lm_head(states[:-1]).float()
    given = torch.tensor(text, device=logits.device)[:, None]
    gaps = logits.amax(dim=-1) - logits.gather(-1, given)[:, 0]
    at = int(gaps.argmax())
    if float(gaps[at]) <= FOREIGN:
        return None
    return f"token {text[at]} at place {at} has a logit {float(gaps[at]):.1f} below that of {int(logits[at].argmax())}"


@torch.inference_mode()
def compare_draws(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> Draws:
    """Compare sampled texts, each after its prompt, with the target's distribution under a temperature above 0."""
    found = torch.zeros(2, dtype=torch.float64)
    expected = torch.zeros_like(found)
    variance = torch.zeros_like(found)
    pairs = [(Request(prompt, len(text), sampling), text) for prompt, text in zip(prompts, texts, strict=True)]
    for (request, text), states in zip(pairs, own_states(target, pairs), strict=True):
        rows = target_sampling(target, request)
        ids = torch.tensor([text], dtype=torch.int64, device=target.device)
        for first in range(0, len(text), CHOICES):
            given = ids[:, first : first + CHOICES]
            logits = target.shared.lm_head(states[None, first : first + given.shape[1]])
            logp = rows.log_distribution(logits, counts_before(rows, ids[:, :first], given))[0].double()
            values = torch.stack([logp.clamp_min(FLOOR), _at_likeliest(logp)])  # (2, tokens, V)
            p = logp.exp()
            means = (p * values).sum(dim=-1)
            found += values.gather(-1, given[0, :, None].expand(2, -1, -1)).sum(dim=(1, 2)).cpu()
            expected += means.sum(dim=1).cpu()
            variance += ((p * values.square()).sum(dim=-1) - means.square()).clamp_min(0).sum(dim=1).cpu()
    return Draws(sum(map(len, texts)), found.tolist(), expected.tolist(), variance.tolist())


def _at_likeliest(logp: Tensor) -> Tensor:
    return torch.zeros_like(logp).scatter_(-1, logp.argmax(dim=-1, keepdim=True), 1.0)


def compare_with_target(
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    texts: Sequence[list[int]],
    settings: BenchSettings,
) -> list[Divergence]:
    """Return where greedy texts of a server differ from plain decoding here. One is a `near_tie` if each of its tokens
    is within rounding of the target's choice."""
    longest = max(len(prompt.ids) for prompt in prompts)
    engine = Engine(target, None, EngineOptions(max_length=longest + settings.max_new_tokens + 1))
    requests = [Request(list(prompt.ids), settings.max_new_tokens, settings.sampling_at(0.0)) for prompt in prompts]
    expected = [output.tokens for output in engine.generate(requests)]
    differing = [n for n, text in enumerate(texts) if text != expected[n]]
    positions = [first_difference(expected[n], texts[n]) or 0 for n in differing]
    beginnings = [(requests[n], texts[n][:position]) for n, position in zip(differing, positions, strict=True)]
    margins = top_two_margins(target, beginnings)
    found = find_mismatches(target, [(requests[n], texts[n]) for n in differing])
    differences = []
    for n, position, margin, mismatches in zip(differing, positions, margins, found, strict=True):
        plain, here = (token_at(position, ids, tokenizer) for ids in (expected[n], texts[n]))
        differences.append(
            Divergence(
                suite=prompts[n].suite,
                prompt=prompts[n].id,
                tree=settings.trees[0],
                against="plain",
                temperature=0.0,
                position=position,
                plain_text=plain[1],
                text=here[1],
                top_two_margin=margin,
                near_tie=None not in (plain[0], here[0]) and all(mismatch.is_within(FAR) for mismatch in mismatches),
                flips=[Flip(**vars(mismatch)) for mismatch in mismatches],
            )
        )
    return differences


def compare_answers(
    server: EngineServer,
    target: FrozenTarget,
    prompts: Sequence[Prompt],
    answers: Mapping[int, Answer],
    sampling: Sampling,
) -> Draws:
    """Compare sampled answers, by the index of their prompts, with the target's distribution."""
    texts = [answer.tokens for answer in answers.values()]
    if (largest := max(max(text) for text in texts)) >= target.vocab_size:
        raise server.error(f"its sampled texts have token {largest}, and {target.name} has {target.vocab_size} tokens")
    return compare_draws(target, [prompts[i].ids for i in answers], texts, sampling)


def pooled(exacts: Sequence[Exact]) -> Exact:
    """Return the record `exact` of all settings: of those whose texts were compared, if there are any."""
    compared = [exact for exact in exacts if exact.identical is not None]
    return Exact(
        prompts=sum(exact.prompts for exact in compared or exacts),
        identical=sum(exact.identical or 0 for exact in compared) if compared else None,
        divergences=[difference for exact in exacts for difference in exact.divergences],
        near_ties=[difference for exact in exacts for difference in exact.near_ties],
        against=(compared or exacts)[0].against,
        draws=None if compared else exacts[0].draws,
    )
