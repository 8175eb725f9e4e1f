"""Drafts that end where the head is unsure: llama.cpp's --spec-draft-p-min ends a draft before a token that is less
likely than a bound, among the head's ten likeliest. The server does not name its bound, so it is found from the counts.

A round at every token of a text shows the draft and its probabilities there. Rounds under any bound follow from these.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from eval.servers.parity_counts import Counting, EngineAnswer, count_distance, counted
from heads.core.tree import Pick, Proposal

CANDIDATES = 10
"""Tokens of a draft's distribution that llama.cpp's draft sampler keeps (b11549)."""
OTHERWISE = ("dflash2", "dspark")
"""Kinds of heads whose drafts llama.cpp ends by another figure."""


@dataclass(frozen=True)
class Draft:
    """What a head drafts after one token of a text."""

    root: int
    tokens: list[int]
    probabilities: list[float]


def note_drafts(head: Any) -> list[Draft]:
    """Make a head on a CPU propose tokens that are never right, and return the list to which it adds what it would have
    proposed: every token of a text becomes a root."""
    propose = head.propose
    noted: list[Draft] = []

    def changed(state: object, pick: Pick) -> Proposal:
        probabilities: list[float] = []
        unlikely: list[int] = []

        def noting(logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None) -> Any:
            probabilities.append(float(logits[0, 0].topk(CANDIDATES).values.softmax(-1)[0]))
            least = int(logits[0, 0].argmin())
            unlikely.append(least if token_ids is None else int(token_ids[least]))
            return pick(logits, positions, count, token_ids)

        proposal: Proposal = propose(state, noting)
        root, *tokens = proposal.tokens[0].tolist()
        noted.append(Draft(root, tokens, probabilities))
        wrong = proposal.tokens.clone()
        wrong[0, 1:] = wrong.new_tensor(unlikely)
        return replace(proposal, tokens=wrong)

    head.propose = changed
    return noted


def clipped(
    drafts: Sequence[Draft], bound: float, text: Sequence[int], new_tokens: int, counting: Counting
) -> EngineAnswer:
    """Return the counts of a text under a bound. `drafts`: after each of its tokens, and beyond its end."""
    accepted = []
    lengths = []
    at = 0
    while at < len(drafts):
        draft = drafts[at]
        sure = next((n for n, p in enumerate(draft.probabilities) if p < bound), len(draft.tokens))
        following = [each.root for each in drafts[at + 1 : at + 1 + sure]]
        right = next((n for n, token in enumerate(following) if token != draft.tokens[n]), len(following))
        accepted.append(right)
        lengths.append(sure)
        at += right + 1
    depth = len(drafts[0].tokens)
    return counted(accepted, text, depth, new_tokens, counting, lengths)


def find_bound(
    drafts: Sequence[Sequence[Draft]], answers: Sequence[EngineAnswer], new_tokens: int, counting: Counting
) -> tuple[float, list[EngineAnswer]]:
    """Return the bound that reproduces an engine's counts best, and the counts of all texts under it."""
    seen = sorted({p for each in drafts for draft in each for p in draft.probabilities})
    bounds = [(one + other) / 2 for one, other in pairwise([0.0, *seen, 1.0])]
    wanted = sum(answer.drafted or 0 for answer in answers)

    def counts(n: int) -> list[EngineAnswer]:
        each = zip(drafts, answers, strict=True)
        return [clipped(noted, bounds[n], answer.tokens, new_tokens, counting) for noted, answer in each]

    def distance(n: int) -> int:
        return sum(map(count_distance, counts(n), answers))

    def surplus(n: int) -> int:
        return wanted - sum(answer.drafted or 0 for answer in counts(n))

    near = bisect_left(range(len(bounds)), 0, key=surplus)  # a higher bound drafts less
    best = min(range(max(0, near - 2), min(len(bounds), near + 3)), key=distance)
    return bounds[best], counts(best)
