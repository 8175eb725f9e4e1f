"""Adaptive drafting: the choice of whether to draft, and how deep, from measured acceptance and cost while decoding.

The candidates are drafts, from the longest to none at all. Each candidate has an estimated speed:

    tokens per second = (1 + sum over k of alpha_1 .. alpha_k) / seconds per round

alpha_k is the running acceptance at depth k, which chains of all lengths share. The host measures the seconds at every
poll. The preferred candidate is `current`. A change begins with a trial of a few rounds with a draft whose estimate is
better. The draft becomes `current` only if the trial confirms the estimate. Because a head may become good or bad as
the text changes, other candidates are tried from time to time, at intervals that double while `current` stays. So a
useless head costs a few rounds at first and fewer later, and a head that stops being useful is soon dropped.

The estimate at an untested depth is that of the depth before it. Costs drift for all drafts together (the context
grows, the machine slows down): when the cost of the candidate in use changes, the costs of the other candidates are
assumed to change by the same factor until they are measured again. A round is assumed to cost no more than a round
that drafts more. If the clock disagrees, something else delayed the cheaper round.

If a head predicts the acceptance of each draft token (`heads.tree.Proposal.confidence`), a round verifies its chain
only as long as

    P(accepted up to here) > seconds to verify one more token * tokens per second

which maximises tokens per second in the long run. A token that was left out counts as refused, so that the candidate
is judged by its output. The confidence is scaled by how well it has predicted so far. The decision on a token uses
only the tokens drafted before it, so the verified tokens are still a draw from the draft's distribution.

The choice of a candidate depends on past rounds and on the clock, never on the next round. Under the rule `match` it
cannot change a token. Under the rules that compare two distributions it also keeps the target's distribution, by
induction from the last round backwards: a round of any shape, continued by draws from the target, is a draw from the
target, and the noise of a round is keyed by its root's position, which no earlier round of the request had. But this
is true only if no two requests share a seed, because the choice carries the effect of one request's noise into rounds
of the next request. The text would also depend on the clock, so it could not be reproduced. Therefore
`eval.runtime.sampling.check_adaptive` refuses those rules.
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
"""Relative margin by which another draft must be faster to be preferred."""
SHORTEST_INTERVAL, LONGEST_INTERVAL = 64, 1024
"""Rounds between two trials of candidates other than the current one."""
EVIDENCE = 64.0
"""Number of tests over which the running acceptance at a depth is averaged."""
OLD_EVIDENCE = 1.0
"""Maximum weight of old acceptance counts, in tests, when a draft is tried again."""
GUESS = 0.5
"""Acceptance of the first draft token before any test, with the weight of one test."""
OLD_ROUNDS = 4
"""Weight of an old cost, in rounds, when a draft is tried again."""
WINDOW = 16
"""Number of rounds over which the running cost is averaged."""
OUTLIER = 1.5
"""Limit on a round's time, in multiples of the usual time. A longer time is replaced by the limit."""


def candidates(shape: TreeShape) -> list[str]:
    """Return the names of the drafts to choose from: `shape`, then ever shorter chains, then none."""
    depths, depth = [], shape.depth
    while depth > 0:
        depths.append(depth)
        depth = min(depth - 1, -(-3 * depth // 5))
    names = [f"chain:{k}" for k in depths]
    return [*([] if is_chain(shape) else [str(shape)]), *names, "none"]


@dataclass
class Acceptance:
    """Running counts of tested and accepted tokens by depth, for one kind of draft."""

    tested: list[float]
    kept: list[float]

    def add(self, tested: Sequence[int], kept: Sequence[int]) -> None:
        """Add the counts of some rounds. Old counts decay."""
        for k, (tests, passes) in enumerate(zip(tested, kept, strict=True)):
            fade = min(1.0, max(EVIDENCE - tests, 0.0) / max(self.tested[k], 1e-9))
            self.tested[k] = self.tested[k] * fade + tests
            self.kept[k] = self.kept[k] * fade + passes

    def fade(self, first: int) -> None:
        """Reduce the weight of old counts from depth `first` on (0 is the first draft token)."""
        for k in range(first, len(self.tested)):
            fade = min(1.0, OLD_EVIDENCE / max(self.tested[k], 1e-9))
            self.tested[k] *= fade
            self.kept[k] *= fade

    def alpha(self) -> list[float]:
        """Return the acceptance at each depth. The prior is the estimate of the depth before it, with the weight of one
        test."""
        estimates, before = [], GUESS
        for tests, passes in zip(self.tested, self.kept, strict=True):
            before = (passes + before) / (tests + 1)
            estimates.append(before)
        return estimates


@dataclass
class Cost:
    """Running average of the seconds per round of one draft."""

    seconds: float | None = None
    rounds: int = 0
    """Rounds measured since this draft was last chosen, plus the weight of its earlier cost."""

    def add(self, seconds: float, rounds: int) -> float:
        """Add `rounds` of `seconds` each. Return the factor by which the running cost changed; 1 while `self.rounds` is
        at most WINDOW."""
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
    """Running estimate of the seconds that one more token adds to a round: the slope of a line fitted to rounds of
    different lengths."""

    weight: float = 0.0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(4))
    """Weighted sums of length, seconds, length * length, and length * seconds."""

    def add(self, length: float, seconds: float, rounds: int) -> None:
        """Add `rounds` of `seconds` each. Old rounds decay."""
        fade = max(1 - rounds / EVIDENCE, 0.0)
        self.weight = self.weight * fade + rounds
        self.sums = self.sums * fade + rounds * np.array([length, seconds, length**2, length * seconds])

    def estimate(self, guess: float) -> float:
        """Return the slope. The prior is `guess`, with the weight of lengths whose variance is 1."""
        if not self.weight:
            return guess
        length, seconds, square, product = self.sums / self.weight
        variance = square - length**2
        return max(float((product - length * seconds + guess) / (variance + 1)), 0.0)


@dataclass
class Calibration:
    """Running ratio of accepted draft tokens to the number that the head predicted."""

    kept: float = 1.0
    foreseen: float = 1.0

    def add(self, kept: float, foreseen: float) -> None:
        """Add the counts of some rounds. Old counts decay."""
        fade = max(1 - foreseen / EVIDENCE, 0.0)
        self.kept, self.foreseen = self.kept * fade + kept, self.foreseen * fade + foreseen


class Span(NamedTuple):
    """Measurements of the rounds with one draft between two polls by the host."""

    rounds: int
    seconds: float
    tested: Sequence[int] = ()
    """Number of tokens tested at each depth, in all rows."""
    kept: Sequence[int] = ()
    """Number of tokens accepted at each depth."""
    length: float | None = None
    """Mean number of draft tokens verified, if the confidence of the draft decides it; else None."""
    foreseen: float = 0.0
    """Number of tested tokens that the head predicted to be accepted."""


@dataclass
class Controller:
    """Choice of the candidate for the next rounds."""

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
        self.spans: list[Span] = []  # noted, but not yet used by `_learn`
        self.current = self.candidate = 0
        self.interval = SHORTEST_INTERVAL
        self.stay = self.stay_tests = 0  # rounds with this candidate since it was chosen, and tests of its first token
        self.measured = False  # True if its cost was measured since then
        self.fresh = True  # the first span with a candidate does not measure its cost: it may warm up or catch up

    def length(self, confidence: np.ndarray) -> int:
        """Return the number of draft tokens to verify of chains with this confidence (B, K): at least one, and none
        after the first token that is not worth its time."""
        ratio = self.calibration.kept / self.calibration.foreseen
        reached = np.minimum(confidence * ratio, 1).cumprod(1).mean(0)
        return max(int((reached > self.price()).cumprod().sum()), 1)

    def price(self) -> float:
        """Return the cost of verifying one more token of a chain, in tokens: its seconds times tokens per second."""
        candidate, plain = self.candidate, self.costs[self.none].seconds
        if plain is None or self.costs[candidate].seconds is None:
            return 0.0
        guess = max(self.seconds(candidate) - plain, 0.0) / self.shapes[candidate].depth
        return self.slopes[candidate].estimate(guess) * self.speed(candidate)

    def note(self, span: Span) -> None:
        """Add the results of the candidate in use, and choose the next candidate."""
        self.rounds[self.candidate] += span.rounds
        self.stay += span.rounds
        self.spans.append(span)
        # Plain rounds show nothing about drafts, and costs drift together: there is nothing to decide yet. The work can
        # wait, because it would displace a plain step's data from the processor's caches.
        if self.candidate == self.current == self.none and self.stay < self.interval:
            return
        for past in self.spans:
            self._learn(past)
        self.spans.clear()
        if self._tried():
            self._choose()

    def _learn(self, span: Span) -> None:
        """Update acceptance and cost from rounds with the candidate in use."""
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
        """Return True if the candidate in use has run long enough to be judged."""
        enough = self.stay >= TRIAL_ROUNDS and (self.candidate == self.none or self.stay_tests >= TRIAL_TESTS)
        return enough and self.measured

    def _choose(self) -> None:
        on_trial = self.candidate != self.current
        if self.costs[self.none].seconds is None:  # in the beginning
            return self._change_to(self.none)
        if self.current != self.none and self.tokens(self.current) < 1 + MARGIN:  # not worth it at any cost of a round
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
        if current == none:  # the shortest draft of each kind is the cheapest to test
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
        # The old cost has little weight, except that of the current candidate, which was measured a moment ago.
        self.costs[candidate].rounds = WINDOW if candidate == self.current else OLD_ROUNDS
        self.measured = False

    def speed(self, candidate: int) -> float:
        """Return the estimated tokens per second of each row."""
        return self.tokens(candidate) / self.seconds(candidate)

    def tokens(self, candidate: int) -> float:
        """Return the expected number of tokens per round of each row."""
        alphas = self.acceptance[candidate].alpha()[: self.shapes[candidate].depth]
        tokens: float = 1.0 + sum(accumulate(alphas, mul))
        return tokens

    def seconds(self, candidate: int) -> float:
        """Return the seconds per round, at most those of any candidate that drafts more. If it was never measured,
        interpolate by depth between the candidates that were."""
        if self.costs[candidate].seconds is not None:
            return min(cost.seconds for cost in self.costs[: candidate + 1] if cost.seconds is not None)
        depth_and_cost = [
            (shape.depth, cost.seconds)
            for shape, cost in zip(self.shapes, self.costs, strict=True)
            if cost.seconds is not None
        ]
        depths, costs = zip(*sorted(depth_and_cost), strict=True)
        return float(np.interp(self.shapes[candidate].depth, depths, costs))
