"""The learning curve of a run: tau over training tokens, and what more tokens would give.

    tau(n) = a - b n^-c + d f          a, b, d >= 0

n: training tokens, in those of the last point. a - b n^-c is a power law, as losses follow at a constant learning rate
(arXiv 1712.00409). f: the fraction by which the learning rate has fallen from the highest of the points. A point that
is measured at a lower rate has a better head (arXiv 2408.11029); without the term, the fit would take half of that for
a gain by more tokens, and promise too much. The term is fitted only if there is a point at less than half of the
highest rate. A curve is of one run: a point before the end is not the end of a shorter run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from eval.records.head_schema import Point
from eval.records.metrics import CONFIDENCE

Floats = npt.NDArray[np.float64]

MIN_POINTS = 4
"""A fit needs this many points."""
MIN_GAIN = 0.02
"""Gain of tau, as a fraction, by twice the tokens, below which a run is near its end."""
EXPONENTS = (0.02, 2.0)
"""Bounds of c. At the lower one, the curve is a straight line over the logarithm of the tokens."""
DRAWS = 500
AHEAD = 4
"""A held-out point has this many times the tokens of the last point to which the curve is fitted."""
ROUNDING = 1.05
"""Factor by which steps, which are whole numbers, may miss that."""


@dataclass(frozen=True)
class Fit:
    """A curve, fitted to the points of one run and `DRAWS` times to points and prompts drawn from them: prompts with
    replacement, the same ones for all points, and points with weights from an exponential distribution."""

    tokens: int
    """Unit of n: the training tokens of the last point."""
    fallen: float
    """f of the last point."""
    parameters: Floats
    """(1 + DRAWS, 4): a, b, d, c of the points themselves, then of each draw."""
    noise: Floats
    """(1 + DRAWS,): normal numbers with the standard deviation of the points around their curve; the first is 0."""

    def values(self, tokens: float, fallen: float) -> Floats:
        """Return tau after so many tokens, (1 + DRAWS,)."""
        a, b, d, c = self.parameters.T
        value: Floats = a - b * (tokens / self.tokens) ** -c + d * fallen
        return value

    def interval(self, values: Floats) -> tuple[float, float, float]:
        """Return a value that follows from the curve, and its 95% interval: of one more measurement, whatever prompts
        of the same kind it has. It holds the spread over prompts, the uncertainty of the curve, and the distance of
        single points from it."""
        outside = (1 - CONFIDENCE) / 2
        low, high = np.quantile((values + self.noise)[1:], [outside, 1 - outside])
        return float(values[0]), float(low), float(high)

    def predict(self, tokens: float, fallen: float | None = None) -> tuple[float, float, float]:
        """Return tau after so many training tokens and its 95% interval (see `interval`), by default with the learning
        rate fallen as far as at the last point."""
        return self.interval(self.values(tokens, self.fallen if fallen is None else fallen))


def fit_curve(points: Sequence[Point]) -> Fit:
    """Fit the curve to at least `MIN_POINTS` points, which were measured on the same prompts (`results.Point`)."""
    return _fit("\n".join(point.model_dump_json() for point in points))


def counts_of(point: Point) -> list[tuple[int, int]]:
    """Return tokens and rounds of each prompt of all suites."""
    return [pair for suite in point.suites.values() for pair in suite.prompts]


@cache
def _fit(text: str) -> Fit:
    """The pages and the terminal say the same of one curve."""
    from scipy.optimize import minimize_scalar, nnls  # takes a moment to import

    points = [Point.model_validate_json(line) for line in text.splitlines()]
    drawn = np.random.default_rng(0)
    tokens = np.array([point.tokens for point in points], float)
    fallen = falls(points)
    n = tokens / tokens[-1]
    counts = np.array([*map(counts_of, points)])
    size = counts.shape[1]
    prompts = np.concatenate([np.arange(size)[None], drawn.integers(size, size=(DRAWS, size))])
    emitted, rounds = np.moveaxis(counts[:, prompts].sum(axis=2), 2, 0)
    taus = (emitted / np.maximum(rounds, 1)).T  # (1 + DRAWS, points)
    weights = np.sqrt(drawn.exponential(size=taus.shape)) / np.maximum(taus.std(axis=0), 1e-3)
    weights[0] = 1 / np.maximum(taus.std(axis=0), 1e-3)
    has_fallen = len(points) > MIN_POINTS and fallen.max() > 0.5

    def solve(y: Floats, weight: Floats) -> list[float]:
        """The curve is linear in a, b and d: only c is searched."""

        def linear(c: float) -> tuple[Floats, float]:
            terms = np.stack([np.ones_like(n), -(n**-c), fallen * has_fallen], axis=1)
            solution: tuple[Floats, float] = nnls(terms * weight[:, None], y * weight)
            return solution

        c = minimize_scalar(lambda c: linear(c)[1], bounds=EXPONENTS, method="bounded").x
        return [*linear(c)[0], c]

    parameters = np.array([solve(y, weight) for y, weight in zip(taus, weights, strict=True)])
    noise = drawn.normal(size=1 + DRAWS)
    noise[0] = 0
    fit = Fit(int(tokens[-1]), float(fallen[-1]), parameters, noise)
    curve = np.array([fit.values(*place)[0] for place in zip(tokens, fallen, strict=True)])
    fit.noise[:] *= np.sqrt(((taus[0] - curve) ** 2).sum() / (len(points) - 3 - has_fallen))
    return fit


def falls(points: Sequence[Point]) -> Floats:
    rates = np.array([point.lr for point in points], float)
    fallen: Floats = 1 - rates / rates.max()
    return fallen


def learning_line(points: Sequence[Point]) -> str | None:
    """Return a sentence on what twice the tokens would give, or on why there is none. None for a head without a curve,
    and where the interval says nothing: it holds no gain as well as a gain worth having."""
    if not points:
        return None
    if any(point.is_estimate for point in points):
        return "the learning curve is an estimate, to which nothing is fitted"
    if len(points) < MIN_POINTS:
        number = f"{len(points)} point{'s' if len(points) > 1 else ''}"
        return f"the learning curve has {number}, a fit needs {MIN_POINTS}: it does not say what more tokens would give"
    fit = fit_curve(points)
    twice = fit.values(2 * fit.tokens, fit.fallen)
    tau, low, high = fit.interval(twice)
    _, least, most = fit.interval(twice - fit.values(fit.tokens, fit.fallen))
    would = f"twice the tokens would give tau about {tau:.2f} [{low:.2f}, {high:.2f}]"
    if most < MIN_GAIN * points[-1].tau:
        return f"near its end: {would}, a gain below {MIN_GAIN:.0%}"
    return f"still learning: {would}" if least > 0 else None


def held_out_lines(points: Sequence[Point]) -> Iterator[str]:
    """Yield for each point whether the curve foresees it that is fitted to the points of up to a quarter of its tokens,
    if these suffice for a fit."""
    for point in points:
        before = [each for each in points if AHEAD * each.tokens <= ROUNDING * point.tokens]
        if len(before) < MIN_POINTS or point.is_estimate:
            continue
        fallen = falls([*before, point])[-1]
        tau, low, high = fit_curve(before).predict(point.tokens, fallen)
        verdict = "within" if low <= point.tau <= high else "outside"
        lower = f", at {1 - fallen:.0%} of the highest learning rate" if fallen > 0.5 else ""
        yield (
            f"held-out check: fitted to the {len(before)} points up to {before[-1].tokens:,} tokens, the curve "
            f"gives tau {tau:.2f} [{low:.2f}, {high:.2f}] at {point.tokens:,}; measured{lower}: "
            f"{point.tau:.2f}, {verdict} the interval"
        )
