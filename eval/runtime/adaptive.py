"""Choice of when to draft, and how deep, made while decoding from the measured acceptance and cost of drafts.

The candidates are drafts, the longest first and none at all last. For each of them

    tokens a second = (1 + sum over k of alpha_1 .. alpha_k) / seconds of a round

with alpha_k the running acceptance at depth k, which chains of all lengths share, and the seconds measured at every
poll by the host. The best one is `current`. A change begins with a trial: a few rounds with the draft that promises
more. It becomes the current one only if it keeps the promise. The other candidates are tried now and then, because a
head may become good or bad with the text: at intervals that double while the current one stays. So a useless head costs
a few rounds in the beginning and ever fewer later, and a good one is left as soon as it is no longer good.

The estimate at an untested depth is that of the depth before it. Drifts of costs are common to all drafts (the context
grows, the machine slows down): where the cost of the current one changes, the others are taken to have changed by the
same factor until they are measured again. And a round costs no more than one that drafts more: where the clock says
otherwise, something else held up the cheaper one.

Where a head says of each draft token how likely it is accepted (`heads.tree.Proposal.confidence`), a round verifies its
chain only so far as

    P(accepted up to here) > seconds that one more token takes to verify * tokens a second

which is the most tokens a second in the long run. A token that was left out counts as one that was refused, so that the
candidate is judged by what it gives. The confidence is scaled by what came of it so far. The decision on a token knows
the tokens drafted before it and no more, so that what is verified is still a draw from the draft's distribution.

The choice of a candidate depends on past rounds and on the clock, never on the round to come. Under the rule `match` it
cannot change a token. Under the rules that compare two distributions it keeps the target's distribution too, by
induction from the last round backwards: a round of any shape, continued by draws from the target, is a draw from the
target, and the noise of a round is keyed by its root's position, which no earlier round of the request had. But that
holds only as long as no two requests share a seed, because the choice carries the effect of one request's noise into
rounds of the next; and the text would depend on the clock, so that none could be repeated. Those rules are therefore
refused: `eval.runtime.sampling.check_adaptive`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from heads.tree import TreeShape, is_chain

TRIAL_ROUNDS, TRIAL_TESTS = 4, 4
"""Minimum number of rounds in a trial, and of tests of the first draft token if there is one."""
MARGIN = 0.03
"""Relative margin by which another draft must be better to be preferred."""
SHORTEST_INTERVAL, LONGEST_INTERVAL = 64, 1024
"""Rounds between two trials of candidates other than the current one."""
EVIDENCE = 64.0
"""Number of tests over which the running acceptance at a depth is averaged."""
OLD_EVIDENCE = 1.0
"""Weight of old evidence, in tests, when a draft is tried again."""
GUESS = 0.5
"""Acceptance of the first draft token before any test, with the weight of one test."""
OLD_ROUNDS = 4
"""Weight of an old cost, in rounds, when a draft is tried again."""
WINDOW = 16
"""Number of rounds over which the running cost is averaged."""
OUTLIER = 1.5
"""Limit on a round's time, in multiples of the usual one. A longer time is replaced by the limit."""


def candidates(shape: TreeShape) -> list[str]:
    """Return the drafts to choose from, by name: `shape`, shorter and shorter chains, none."""
    depths, depth = [], shape.depth
    while depth > 0:
        depths.append(depth)
        depth = min(depth - 1, -(-3 * depth // 5))
    names = [f"chain:{k}" for k in depths]
    return [*([] if is_chain(shape) else [str(shape)]), *names, "none"]


@dataclass
class Acceptance:
    """Running counts by depth for one kind of draft."""

    tested: list[float]
    kept: list[float]

    def add(self, tested: Sequence[int], kept: Sequence[int]) -> None:
        """Add the counts of some rounds; old ones decay."""
        for k, (tests, passes) in enumerate(zip(tested, kept, strict=True)):
            fade = min(1.0, max(EVIDENCE - tests, 0.0) / max(self.tested[k], 1e-9))
            self.tested[k] = self.tested[k] * fade + tests
            self.kept[k] = self.kept[k] * fade + passes

    def fade(self, first: int) -> None:
        """Reduce the weight of the counts from depth `first` on (0 is the first), because they are old."""
        for k in range(first, len(self.tested)):
            fade = min(1.0, OLD_EVIDENCE / max(self.tested[k], 1e-9))
            self.tested[k] *= fade
            self.kept[k] *= fade

    def alpha(self) -> list[float]:
        """Return the estimate at each depth, with the one before it as the prior, worth one test."""
        estimates, before = [], GUESS
        for tests, passes in zip(self.tested, self.kept, strict=True):
            before = (passes + before) / (tests + 1)
            estimates.append(before)
        return estimates


@dataclass
class Cost:
    """Running time of a round in seconds."""

    seconds: float | None = None
    rounds: int = 0
    """Rounds since this draft was last chosen."""

    def add(self, seconds: float, rounds: int) -> float:
        """Add `rounds` of `seconds` each. Return the factor by which the running cost moved, 1 in the first WINDOW."""
        if self.seconds is None:
            self.seconds, self.rounds = seconds, rounds
            return 1.0
        self.rounds += rounds
        before = self.seconds
        weight = min(1.0, rounds / min(self.rounds, WINDOW))
        self.seconds += weight * (min(seconds, OUTLIER * before) - before)
        return self.seconds / before if self.rounds > WINDOW else 1.0


@dataclass
class Slope:
    """Running estimate of the seconds that one more token adds to a round, by the line through rounds of different
    lengths."""

    weight: float = 0.0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(4))
    """Of length, seconds, length * length, and length * seconds."""

    def add(self, length: float, seconds: float, rounds: int) -> None:
        """Add `rounds` of `seconds` each; old ones decay."""
        fade = max(1 - rounds / EVIDENCE, 0.0)
        self.weight = self.weight * fade + rounds
        self.sums = self.sums * fade + rounds * np.array([length, seconds, length**2, length * seconds])

    def estimate(self, guess: float) -> float:
        """Return the slope, with `guess` as the prior, worth lengths that vary by one token."""
        if not self.weight:
            return guess
        length, seconds, square, product = self.sums / self.weight
        variance = square - length**2
        return max(float((product - length * seconds + guess) / (variance + 1)), 0.0)


@dataclass
class Calibration:
    """Running ratio of the draft tokens that were accepted to the number that the head foresaw."""

    kept: float = 1.0
    foreseen: float = 1.0

    def add(self, kept: float, foreseen: float) -> None:
        """Add the counts of some rounds; old ones decay."""
        fade = max(1 - foreseen / EVIDENCE, 0.0)
        self.kept, self.foreseen = self.kept * fade + kept, self.foreseen * fade + foreseen


class Span(NamedTuple):
    """Rounds with one draft between two polls by the host."""

    rounds: int
    seconds: float
    tested: Sequence[int] = ()
    """Number of tokens tested at each depth, in all rows."""
    kept: Sequence[int] = ()
    """Number of tokens accepted at each depth."""
    length: float | None = None
    """Mean number of draft tokens verified, where that is decided by the draft."""
    foreseen: float = 0.0
    """Number of tested tokens that the head foresaw to be accepted."""


@dataclass
class Controller:
    """Controller that chooses the candidate of the next rounds."""

    shapes: Sequence[TreeShape]
    """Candidates: drafts that differ in depth, the deepest first, plain decoding last."""
    rounds: list[int] = field(default_factory=list)
    """Rounds so far, by candidate."""

    def __post_init__(self) -> None:
        assert self.shapes[-1].nodes == 1 and all(shape.nodes > 1 for shape in self.shapes[:-1]), self.shapes
        self.none = len(self.shapes) - 1  # the candidate that drafts nothing
        kinds = ["chain" if is_chain(shape) else str(shape) for shape in self.shapes]
        depth = max(shape.depth for shape in self.shapes)
        known = {kind: Acceptance([0.0] * depth, [0.0] * depth) for kind in kinds}
        self.acceptance = [known[kind] for kind in kinds]
        self.costs = [Cost() for _ in self.shapes]
        self.slopes = [Slope() for _ in self.shapes]
        self.calibration = Calibration()
        self.rounds = [0] * len(self.shapes)
        self.last_tried = [0] * len(self.shapes)
        self.spans: list[Span] = []  # not yet learnt from
        self.current = self.candidate = 0
        self.interval = SHORTEST_INTERVAL
        self.stay = self.stay_tests = 0  # rounds with this candidate since it was chosen, and tests of its first token
        self.measured = False  # whether its cost was measured since then
        self.fresh = True  # the first span with a candidate is no measure of its cost: it may warm up or catch up

    def length(self, confidence: np.ndarray) -> int:
        """Return the number of draft tokens to verify of chains with this confidence (B, K): at least one, and none
        behind the first that is not worth it."""
        ratio = self.calibration.kept / self.calibration.foreseen
        reached = np.minimum(confidence * ratio, 1).cumprod(1).mean(0)
        return max(int((reached > self.price()).cumprod().sum()), 1)

    def price(self) -> float:
        """Return the tokens that the time to verify one more token of a chain is worth."""
        candidate, plain = self.candidate, self.costs[self.none].seconds
        if plain is None or self.costs[candidate].seconds is None:
            return 0.0
        guess = max(self.seconds(candidate) - plain, 0.0) / self.shapes[candidate].depth
        return self.slopes[candidate].estimate(guess) * self.speed(candidate)

    def note(self, span: Span) -> None:
        """Add the results of the current candidate, and choose the next."""
        self.rounds[self.candidate] += span.rounds
        self.stay += span.rounds
        self.spans.append(span)
        # While nothing is drafted nothing is learnt of drafts, and costs move together: there is nothing to weigh, and
        # what a plain step's caches have no room for had better wait.
        if self.candidate == self.current == self.none and self.stay < self.interval:
            return
        for past in self.spans:
            self._learn(past)
        self.spans.clear()
        if self._tried():
            self._choose()

    def _learn(self, span: Span) -> None:
        """Update acceptance and cost from rounds with the current candidate."""
        candidate, depth = self.candidate, self.shapes[self.candidate].depth
        if depth:
            untested = [0] * (len(self.acceptance[candidate].tested) - depth)
            self.acceptance[candidate].add([*span.tested, *untested], [*span.kept, *untested])
            self.stay_tests += span.tested[0]
            if span.length is not None:
                self.calibration.add(sum(span.kept), span.foreseen)
        if not self.fresh:
            self.measured = True
            seconds = span.seconds / span.rounds
            if span.length is not None:
                usual = self.costs[candidate].seconds or seconds
                self.slopes[candidate].add(span.length, min(seconds, OUTLIER * usual), span.rounds)
            factor = self.costs[candidate].add(seconds, span.rounds)
            for other in range(len(self.costs)):
                known = self.costs[other].seconds
                if other != candidate and known is not None:
                    self.costs[other].seconds = known * factor
        self.fresh = False

    def _tried(self) -> bool:
        """Return True if the current candidate has run long enough to be judged."""
        enough = self.stay >= TRIAL_ROUNDS and (self.candidate == self.none or self.stay_tests >= TRIAL_TESTS)
        return enough and self.measured

    def _choose(self) -> None:
        on_trial = self.candidate != self.current
        if self.costs[self.none].seconds is None:  # in the beginning
            return self._change_to(self.none)
        if self.current != self.none and self.tokens(self.current) < 1 + MARGIN:  # no clock can make it worth its cost
            self.current, self.interval = self.none, SHORTEST_INTERVAL
            return self._change_to(self.none)
        speeds = [self.speed(candidate) for candidate in range(len(self.shapes))]
        best = max(range(len(speeds)), key=lambda candidate: speeds[candidate])
        better = speeds[best] > (1 + MARGIN) * speeds[self.current]
        if better and best == self.candidate:
            self.current, self.interval = best, SHORTEST_INTERVAL
        elif better:
            self._change_to(best)
        elif on_trial:
            self.interval = min(2 * self.interval, LONGEST_INTERVAL)
            self._change_to(self.current)
        elif self.stay >= self.interval:
            self._try_another()
        return None

    def _try_another(self) -> None:
        current, none = self.current, self.none
        if current == none:  # the shortest of each kind is the cheapest to test
            kinds = {id(self.acceptance[candidate]): candidate for candidate in range(none)}
            candidates = set(kinds.values())
        else:
            candidates = {current - 1, current + 1, none} - {-1}
        candidate = min(sorted(candidates), key=lambda candidate: self.last_tried[candidate])
        self.acceptance[candidate].fade(
            self.shapes[current].depth if self.acceptance[candidate] is self.acceptance[current] else 0
        )
        self._change_to(candidate)

    def _change_to(self, candidate: int) -> None:
        self.last_tried[self.candidate] = sum(self.rounds)
        self.candidate, self.fresh = candidate, True
        self.stay = self.stay_tests = 0
        if self.costs[candidate].seconds is not None:
            self.costs[candidate].seconds = self.seconds(candidate)
        # The estimate is old, but that of the current one was known a moment ago.
        self.costs[candidate].rounds = WINDOW if candidate == self.current else OLD_ROUNDS
        self.measured = False

    def speed(self, candidate: int) -> float:
        """Return the estimated tokens per second of each row."""
        return self.tokens(candidate) / self.seconds(candidate)

    def tokens(self, candidate: int) -> float:
        """Return the expected tokens of a round in each row."""
        alphas = self.acceptance[candidate].alpha()[: self.shapes[candidate].depth]
        tokens: float = 1.0 + sum(accumulate(alphas, mul))
        return tokens

    def seconds(self, candidate: int) -> float:
        """Return the seconds of a round: at most those of one that drafts more; if it was never measured, interpolated
        between its neighbours by depth."""
        if self.costs[candidate].seconds is not None:
            return min(cost.seconds for cost in self.costs[: candidate + 1] if cost.seconds is not None)
        depth_and_cost = [
            (shape.depth, cost.seconds)
            for shape, cost in zip(self.shapes, self.costs, strict=True)
            if cost.seconds is not None
        ]
        depths, costs = zip(*sorted(depth_and_cost), strict=True)
        return float(np.interp(self.shapes[candidate].depth, depths, costs))
