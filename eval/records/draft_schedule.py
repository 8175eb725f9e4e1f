"""The number of draft tokens by load, from chains that were measured at several batch sizes: what vLLM's
`num_speculative_tokens_per_batch_size` takes."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from eval.records.figures_schema import Measurement
from eval.records.speedup_checks import verdict_of, why_unreliable

ABOVE = 100_000
"""Last batch size of a schedule: more requests than a server decodes together."""

SAME = 0.95
"""Share of K draft tokens a round up to which a server drafts K: a request that was put back lost a few."""


class Step(NamedTuple):
    """The draft tokens of a round from one batch size to another, both included."""

    first: int
    last: int
    drafts: int
    least: Measurement | None
    """The smallest speedup that supports the step; None for a step without drafts."""


def draft_schedule(measurements: Sequence[Measurement], headline: Measurement) -> list[Step]:
    """Return the draft tokens by batch size, from 1 to `ABOVE`, at the headline's temperature and context. Empty unless
    two batch sizes have reliable speedups and a draft pays at one, or if a server drafted fewer tokens than its K.

    At a measured size the fastest chain drafts of which the whole interval of the speedup is above 1, or none. Between
    two measured sizes the smaller of their numbers holds, below the smallest its own, and above the largest there are
    no drafts.
    """
    place = (headline.head, headline.temperature, headline.context)
    chains = [m for m in measurements if m.tree.startswith("chain:") and m.batch_size and why_unreliable(m) is None]
    chains = [m for m in chains if m.speedup and m.speedup.ci95]  # prompts that were one batch have no interval
    chains = [m for m in chains if (m.head, m.temperature, m.context) == place]
    if any(map(adapts, chains)):
        return []
    best: dict[int, Measurement | None] = {}
    for m in sorted(chains, key=speed_of):
        size = m.batch_size or 0
        best[size] = m if verdict_of(m) == "pays" else best.get(size)
    if len(best) < 2 or not any(best.values()):
        return []
    drafts = {size: fastest.depth if fastest else 0 for size, fastest in sorted(best.items())}
    spans, last = [], 0
    for before, size in pairwise([min(drafts), *drafts]):
        spans += [(size - 1, min(drafts[before], drafts[size]))] * (last < size - 1) + [(size, drafts[size])]
        last = size
    steps: list[Step] = []
    for number, group in groupby([*spans, (ABOVE, 0)], key=lambda span: span[1]):
        first, last = 1 + (steps[-1].last if steps else 0), [*group][-1][0]
        support = [m for size, m in best.items() if m and first <= size <= last]
        steps.append(Step(first, last, number, min(support, key=speed_of, default=None)))
    return steps


def adapts(m: Measurement) -> bool:
    """Return True if a server drafted fewer tokens than its K, as one with a schedule does."""
    return m.drafted is not None and m.drafted < SAME * m.depth


def speed_of(m: Measurement) -> float:
    assert m.speedup is not None
    return m.speedup.measured
