"""Whether what was decoded is what the target decodes: token by token where that can be, else in law.

Under the rule `match`, and under any rule at temperature 0, every token must be plain decoding's. Under the other rules
a sampled text is another draw from the target's law than plain decoding's: no comparison of texts can tell a right one
from a wrong one. That the rules keep the law is proved by summing up everything that can happen (tests/eval/runtime/
test_rejection.py). What is left to check of a run is checked here: that the same engines, over the same prompts at
temperature 0, give plain decoding's tokens, and that every repeat gives the same tokens again.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eval.benchmark.measure import Contender, Race
from eval.runtime.distribution import RowSampling, gumbel
from eval.runtime.identity import find_flips, is_narrow, pinned_engine
from eval.runtime.sampling import Sampling
from heads.target.frozen import FrozenTarget
from heads.tree import is_chain

Divergence = dict[str, Any]


def audit(race: Race, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase) -> list[list[Divergence]]:
    """For each of `race.drafting`: where it is not exact, by `find_divergences`."""
    found = [[] if c.in_law(race) else find_differences(race, c, target, tokenizer) for c in race.drafting]
    judged = [n for n, contender in enumerate(race.drafting) if contender.in_law(race)]
    if judged:
        greedy = at_temperature_zero(race, judged)
        for n, contender in zip(judged, greedy.drafting, strict=True):
            found[n] = find_differences(greedy, contender, target, tokenizer)
            found[n] += find_divergences(race, race.drafting[n], target, tokenizer, reference=race.drafting[n])
    return found


def find_differences(
    race: Race, contender: Contender, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase
) -> list[Divergence]:
    """Where a contender's tokens are not plain decoding's; in narrow numbers on a GPU, those of plain decoding through
    steps of as many nodes, and a text of a tree that differs in near-ties alone is marked `near_tie`
    (`eval.runtime.identity`)."""
    if not is_narrow(target):
        return find_divergences(race, contender, target, tokenizer)
    pinned = pinned_engine(contender.engine)
    reference = Contender(pinned)
    for unit, indices in enumerate(race.units):
        reference.run(unit, indices, race.requests, 0)
    found = find_divergences(race, contender, target, tokenizer, reference=reference)
    by_id = {(prompt.suite, prompt.id): i for i, prompt in enumerate(race.prompts)}
    for divergence in found:
        i = by_id[divergence["suite"], divergence["prompt"]]
        flips = find_flips(pinned, race.requests[i], contender.outputs[divergence["repeat"]][i].tokens)
        may_tie = not is_chain(contender.shape) and not contender.engine.strict
        divergence["against"] = "plain"
        divergence["near_tie"] = may_tie and bool(flips) and all(flip.is_near_tie for flip in flips)
        divergence["flips"] = [{**asdict(flip), "near_tie": flip.is_near_tie} for flip in flips]
    return found


def at_temperature_zero(race: Race, chosen: list[int]) -> Race:
    """The prompts decoded once more by the same engines, greedily: plainly, and by the chosen of `race.drafting`."""
    requests = [replace(request, sampling=Sampling()) for request in race.requests]
    contenders = [Contender(c.engine) for c in (race.plain, *(race.drafting[n] for n in chosen))]
    for unit, indices in enumerate(race.units):
        for contender in contenders:
            contender.run(unit, indices, requests, 0)
    return Race(race.prompts, requests, race.units, contenders[0], contenders[1:])


def find_divergences(
    race: Race,
    contender: Contender,
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    reference: Contender | None = None,
) -> list[Divergence]:
    """Where a contender's tokens, in any repeat, are not the first ones of `reference`, plain decoding by default: one
    entry a prompt, at most.

    Called with `race.plain` itself, it tells whether plain decoding repeats itself.
    """
    found = []
    first = reference or race.plain
    for i, prompt in enumerate(race.prompts):
        expected = first.outputs[0][i].tokens
        for repeat, outputs in enumerate(contender.outputs):
            position = first_difference(expected, outputs[i].tokens)
            if position is None:
                continue
            pair = [tokens[position] if position < len(tokens) else None for tokens in (expected, outputs[i].tokens)]
            margin = top_two_margin(target, [*prompt.ids, *expected[:position]], race.requests[i].sampling)
            found.append(
                {
                    "suite": prompt.suite,
                    "prompt": prompt.id,
                    "tree": str(contender.shape),
                    "against": "plain" if first is race.plain else "itself",
                    "temperature": race.requests[i].sampling.temperature,
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
    """The first position at which two token sequences differ, the shorter one's end included; None if they are
    equal."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


@torch.no_grad()
def top_two_margin(target: FrozenTarget, ids: Sequence[int], sampling: Sampling) -> float:
    """By how much the token after `ids` won: the gap between the two best scores that the choice compares.

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
    logits = target.ends.logits(features.hidden[:, -1:])  # (1, 1, V)
    if sampling.temperature == 0:
        scores = logits.log_softmax(dim=-1)
    else:
        rows = RowSampling(1, target.device)
        rows.set_row(0, sampling)
        position = torch.full((1, 1), T, device=target.device)
        token_ids = torch.arange(logits.shape[-1], device=target.device)
        scores = rows.log_law(logits) + gumbel(rows.seed, position, token_ids)
    best = scores.flatten().topk(2).values
    return float(best[0] - best[1])
