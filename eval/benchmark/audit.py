"""Audit of decoded tokens: the same as the target's token by token, or where that cannot be, in distribution.

Under the rule `match`, and under any rule at temperature 0, every token must be plain decoding's. Under the other rules
a sampled text is another draw from the target's distribution than plain decoding's: no comparison of texts can
distinguish a right one from a wrong one. That the rules keep the distribution is proved by summing up everything that
can happen (tests/eval/runtime/test_rejection.py). The rest is checked here: the same engines, over the same prompts at
temperature 0, must give plain decoding's tokens, and every repeat the same tokens again.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eval.benchmark.measure import Comparison, Variant
from eval.runtime.identity import find_flips, pinned_engine
from eval.runtime.sampling import Sampling
from heads.backends.selection import is_narrow
from heads.backends.torch.noise import gumbel
from heads.backends.torch.sampling import RowSampling
from heads.target.frozen import FrozenTarget
from heads.tree import is_chain

Divergence = dict[str, Any]


def audit(comparison: Comparison, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase) -> list[list[Divergence]]:
    """Return for each of `comparison.drafting` the places where it is not exact, by `find_divergences`."""
    found = [
        [] if c.in_distribution(comparison) else find_differences(comparison, c, target, tokenizer)
        for c in comparison.drafting
    ]
    judged = [n for n, variant in enumerate(comparison.drafting) if variant.in_distribution(comparison)]
    if judged:
        greedy = at_temperature_zero(comparison, judged)
        for n, variant in zip(judged, greedy.drafting, strict=True):
            found[n] = find_differences(greedy, variant, target, tokenizer)
            found[n] += find_divergences(
                comparison, comparison.drafting[n], target, tokenizer, reference=comparison.drafting[n]
            )
    return found


def find_differences(
    comparison: Comparison, variant: Variant, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase
) -> list[Divergence]:
    """Find the places where a variant's tokens are not plain decoding's; in narrow numbers on a GPU, those of plain
    decoding through steps of as many nodes. A text of a tree that differs in near-ties alone is marked `near_tie`
    (`eval.runtime.identity`)."""
    if not is_narrow(target):
        return find_divergences(comparison, variant, target, tokenizer)
    pinned = pinned_engine(variant.engine)
    reference = Variant(pinned)
    for unit, indices in enumerate(comparison.units):
        reference.run(unit, indices, comparison.requests, 0)
    found = find_divergences(comparison, variant, target, tokenizer, reference=reference)
    by_id = {(prompt.suite, prompt.id): i for i, prompt in enumerate(comparison.prompts)}
    for divergence in found:
        i = by_id[divergence["suite"], divergence["prompt"]]
        flips = find_flips(pinned, comparison.requests[i], variant.outputs[divergence["repeat"]][i].tokens)
        may_tie = not is_chain(variant.shape) and not variant.engine.options.strict
        divergence["against"] = "plain"
        divergence["near_tie"] = may_tie and bool(flips) and all(flip.is_near_tie for flip in flips)
        divergence["flips"] = [{**asdict(flip), "near_tie": flip.is_near_tie} for flip in flips]
    return found


def at_temperature_zero(comparison: Comparison, chosen: list[int]) -> Comparison:
    """Decode the prompts again with the same engines, greedily: plainly, and by the chosen of `comparison.drafting`."""
    requests = [replace(request, sampling=Sampling()) for request in comparison.requests]
    variants = [Variant(c.engine) for c in (comparison.plain, *(comparison.drafting[n] for n in chosen))]
    for unit, indices in enumerate(comparison.units):
        for variant in variants:
            variant.run(unit, indices, requests, 0)
    return Comparison(comparison.prompts, requests, comparison.units, variants[0], variants[1:])


def find_divergences(
    comparison: Comparison,
    variant: Variant,
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    reference: Variant | None = None,
) -> list[Divergence]:
    """Find the places where a variant's tokens, in any repeat, are not the first ones of `reference`, plain decoding by
    default: at most one entry a prompt. With `comparison.plain` itself, this checks that plain decoding repeats itself.

    Called with `comparison.plain` itself, it tells whether plain decoding repeats itself.
    """
    found = []
    first = reference or comparison.plain
    for i, prompt in enumerate(comparison.prompts):
        expected = first.outputs[0][i].tokens
        for repeat, outputs in enumerate(variant.outputs):
            position = first_difference(expected, outputs[i].tokens)
            if position is None:
                continue
            pair = [tokens[position] if position < len(tokens) else None for tokens in (expected, outputs[i].tokens)]
            margin = top_two_margin(target, [*prompt.ids, *expected[:position]], comparison.requests[i].sampling)
            found.append(
                {
                    "suite": prompt.suite,
                    "prompt": prompt.id,
                    "tree": str(variant.shape),
                    "against": "plain" if first is comparison.plain else "itself",
                    "temperature": comparison.requests[i].sampling.temperature,
                    "repeat": repeat,
                    "position": position,
                    "plain_token": pair[0],
                    "token": pair[1],
                    "plain_text": None if pair[0] is None else tokenizer.decode([pair[0]]),
                    "text": None if pair[1] is None else tokenizer.decode([pair[1]]),
                    "top_two_margin": margin,
                }
            )
            break
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two token sequences differ, the shorter one's end included; None if they are
    equal."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


@torch.no_grad()
def top_two_margin(target: FrozenTarget, ids: Sequence[int], sampling: Sampling) -> float:
    """Return the margin of the token after `ids`: the gap between the two best scores that the choice compares. At
    temperature 0 the scores are log-probabilities, else processed log-probabilities plus the position's noise.

    At temperature 0 the scores are log-probabilities, else processed log-probabilities plus the position's noise.
    """
    T = len(ids)
    tokens = torch.tensor([ids], device=target.device)  # (1, T)
    positions = torch.arange(T, device=target.device)
    features = target.features(
        tokens,
        positions=positions[None],
        visible=(positions <= positions[:, None])[None],
        key_positions=positions[None],
    )
    logits = target.shared.lm_head(features.hidden[:, -1:])  # (1, 1, V)
    if sampling.temperature == 0:
        scores = logits.log_softmax(dim=-1)
    else:
        rows = RowSampling(1, target.device)
        rows.set_row(0, sampling)
        position = torch.full((1, 1), T, device=target.device)
        token_ids = torch.arange(logits.shape[-1], device=target.device)
        scores = rows.log_distribution(logits) + gumbel(rows.seed, position, token_ids)
    best = scores.flatten().topk(2).values
    return float(best[0] - best[1])
