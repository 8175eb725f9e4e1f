"""Whether what was decoded is what the target decodes: token by token where that can be, else in law.

Under the rule `match`, and under any rule at temperature 0, every token must be plain decoding's. Under the other rules
a sampled text is another draw from the target's law than plain decoding's: no comparison of texts can tell a right one
from a wrong one. That the rules keep the law is proved by summing up everything that can happen (tests/eval/runtime/
test_rejection.py). What is left to check of a run is checked here: that the same engines, over the same prompts at
temperature 0, give plain decoding's tokens, and that every repeat gives the same tokens again.
"""

from dataclasses import asdict, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from eval.measure import Contender, Race, find_divergences
from eval.runtime.identity import find_flips, is_narrow, pinned_engine
from eval.runtime.sampling import Sampling
from heads.target import FrozenTarget
from heads.tree import ROOT_ONLY, is_chain

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
    reference = Contender(ROOT_ONLY, pinned)
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
    contenders = [Contender(c.shape, c.engine) for c in (race.plain, *(race.drafting[n] for n in chosen))]
    for unit, indices in enumerate(race.units):
        for contender in contenders:
            contender.run(unit, indices, requests, 0)
    return Race(race.prompts, requests, race.units, contenders[0], contenders[1:])
