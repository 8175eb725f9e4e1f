"""Metrics of a measurement: acceptance length, acceptance by depth, speeds, and their confidence intervals.

The first token of an output comes from the prefill. The metrics count the n - 1 tokens after it and the target passes
("rounds") that produced them. A round emits its accepted draft tokens and the bonus token, which the target chooses.
Only a round that is cut by the end of the output may emit no bonus token.

Confidence intervals are percentile bootstraps over units (a prompt, or the prompts that were timed together): units are
drawn with replacement, and the ratio is recomputed from the sums of the drawn units. If two measurements are compared,
both use the same drawn units (paired), so that differences between easy and hard prompts do not count as noise. With
fewer than two units that contribute there is no interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from eval.records.figures_schema import Bin, DraftUse, Percentiles

if TYPE_CHECKING:
    from eval.runtime.request import Output

Interval = tuple[float, float]
Rate = tuple[Sequence[float], Sequence[float]]
"""Gains and costs by unit, such as tokens and seconds."""

BOOTSTRAP_DRAWS = 2_000
CONFIDENCE = 0.95
NEAR = 128
"""Number of positions in the first bin of `tau_by_position`."""
LOOP_TAIL = 48
LOOP_PERIOD = 16


def tau(outputs: Sequence[Output]) -> float:
    """Return the acceptance length: tokens emitted per target pass, bonus token included, as sum over sum. Plain
    decoding has 1."""
    return _ratio(sum(o.decoded for o in outputs), sum(o.rounds for o in outputs))


def tau_per_request(outputs: Sequence[Output]) -> float | None:
    """Return the mean of the outputs' own acceptance lengths, whatever their number of rounds."""
    each = [o.decoded / o.rounds for o in outputs if o.rounds]
    return sum(each) / len(each) if each else None


def tau_interval(outputs: Sequence[Output]) -> Interval | None:
    return ratio_interval([o.decoded for o in outputs], [o.rounds for o in outputs])


def tau_by_position(outputs: Sequence[Output]) -> list[Bin]:
    """Return `tau` by the position of the round's root, in bins from `from` (inclusive) to `to` (exclusive), with its
    interval over prompts. The first two bins have NEAR positions, and later ones double. Bins without rounds are left
    out."""
    bins: dict[int, dict[int, list[int]]] = {}  # bin -> prompt -> tokens, rounds
    for prompt, output in enumerate(outputs):
        root = output.start
        for tokens in output.emitted():
            sums = bins.setdefault((root // NEAR).bit_length(), {}).setdefault(prompt, [0, 0])
            sums[0] += tokens
            sums[1] += 1
            root += tokens
    parts = []
    for number, by_prompt in sorted(bins.items()):
        emitted, rounds = zip(*by_prompt.values(), strict=True)
        parts.append(
            Bin(
                start=NEAR * 2 ** (number - 1) if number else 0,
                to=NEAR * 2**number,
                mean=_ratio(sum(emitted), sum(rounds)),
                ci95=ratio_interval(emitted, rounds),
                rounds=sum(rounds),
            )
        )
    return parts


def acceptance_by_depth(outputs: Sequence[Output], depth: int) -> list[float | None]:
    """Return alpha_k for k = 1..depth: how often the k-th draft token was accepted if the k - 1 before it were.

    alpha_k = #(rounds with >= k accepted) / #(rounds that tested a k-th token). A round that is cut by the end of the
    output does not count for depths after the cut, and a tree without a node at depth k does not count for k. None if
    no round tested depth k.

    Only tokens that a round emitted beyond plain decoding's one count as accepted, as in `tau`: if the cut took the
    bonus token, the last draft token stands in its place.
    """
    pairs = [pair for output in outputs for pair in counted(output)]
    accepted = np.array([count for count, _ in pairs], dtype=np.int64)
    reached = np.array([level for _, level in pairs], dtype=np.int64)
    assert accepted.shape == reached.shape, f"{accepted.shape} rounds accepted, {reached.shape} reached"
    assert (accepted <= reached).all() and (reached <= depth).all(), (accepted, reached, depth)
    return [
        int((accepted >= k).sum()) / tested if (tested := int((reached >= k).sum())) else None
        for k in range(1, depth + 1)
    ]


def counted(output: Output) -> list[tuple[int, int]]:
    """Return for each round how many draft tokens it gained, one less than it emitted, and the deepest level tested. A
    last round whose bonus token was cut off gains its draft tokens but one, and shows no more."""
    rounds = zip(output.accepted, output.reached, output.emitted(), strict=True)
    return [(gain := emitted - 1, reached if gain == accepted else gain) for accepted, reached, emitted in rounds]


def use_of_lookup(outputs: Iterable[Output]) -> DraftUse:
    """Return how many rounds the lookup drafted, of outputs with two drafts, and what they gained."""
    gains = [
        gain for output in outputs for copied, (gain, _) in zip(output.copied, counted(output), strict=True) if copied
    ]
    return DraftUse(rounds=len(gains), accepted=sum(gains))


def accepted_histogram(outputs: Iterable[Output], depth: int) -> list[int]:
    counts = Counter(gain for output in outputs for gain, _ in counted(output))
    return [counts[n] for n in range(depth + 1)]


def tokens_per_second(tokens: Sequence[int], seconds: Sequence[float]) -> float:
    """Return total tokens over total decode seconds. Neither includes the prefill and its token."""
    return _ratio(sum(tokens), sum(seconds))


def rate_ratio(rate: Rate, reference: Rate) -> float:
    """Return the ratio of two rates, each a sum of gains over a sum of costs.

    A speedup is such a ratio: each side's own tokens over its own seconds, since near-ties and rules that are exact
    only in distribution give the two sides different texts.
    """
    return _ratio(_ratio(sum(rate[0]), sum(rate[1])), _ratio(sum(reference[0]), sum(reference[1])))


def rate_ratio_interval(rate: Rate, reference: Rate) -> Interval | None:
    """Return the 95% interval of `rate_ratio`, paired over units."""
    sums = [np.asarray(part, dtype=np.float64) for part in (*rate, *reference)]
    size = sums[0].size
    assert all(part.shape == (size,) for part in sums), [part.shape for part in sums]
    if np.count_nonzero(sums[1]) < 2:
        return None
    drawn = np.random.default_rng(0).integers(size, size=(BOOTSTRAP_DRAWS, size))  # the same units in every call
    gains, costs, other_gains, other_costs = (part[drawn].sum(axis=1) for part in sums)
    below = costs * other_gains
    ratios = (gains * other_costs)[below > 0] / below[below > 0]
    if not ratios.size:
        return None
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [outside, 1 - outside])
    return (float(low), float(high))


def predicted_speedup(tau: float, *, plain_seconds: float, round_seconds: float) -> float:
    """Return the speedup expected from acceptance and from the times of a plain step and a round: tau * t_plain /
    t_round. Both times are sums of phases, or both are medians of whole steps."""
    return tau * _ratio(plain_seconds, round_seconds)


def round_seconds(output: Output, rounds: Sequence[float]) -> Sequence[float]:
    """Return the seconds of an output's own rounds, given those of each round of its batch."""
    return rounds[output.first_round :][: output.rounds]


def token_seconds(output: Output, rounds: Sequence[float]) -> list[float]:
    """Return the time of each token after the first: its round's seconds, divided by the tokens that the round emitted.
    Rounds that accept little have slow tokens, which a mean hides. `rounds`: seconds of each round of the batch."""
    seconds = round_seconds(output, rounds)
    return [each / count for count, each in zip(output.emitted(), seconds, strict=True) for _ in range(count)]


def token_percentiles(seconds: Sequence[float]) -> Percentiles:
    """Return percentiles of `token_seconds` in milliseconds."""
    p50, p95, p99 = np.percentile(np.asarray(seconds), (50, 95, 99)) if seconds else [float("nan")] * 3
    return Percentiles(p50=1e3 * float(p50), p95=1e3 * float(p95), p99=1e3 * float(p99))


def is_loop(tokens: Sequence[int]) -> bool:
    """Return True if an output ended in a loop: its last LOOP_TAIL tokens repeat with a period of at most LOOP_PERIOD.
    Loops are easy to draft and inflate every metric, so their share is reported. A shorter output is not a loop."""
    end = list(tokens[-LOOP_TAIL:])
    return len(end) == LOOP_TAIL and any(end[p:] == end[:-p] for p in range(1, LOOP_PERIOD + 1))


def loop_share(generations: Sequence[Sequence[int]]) -> float:
    return sum(map(is_loop, generations)) / len(generations) if generations else 0.0


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """Return the 95% percentile-bootstrap interval of sum(numerators) / sum(denominators), paired over units."""
    ones = [1.0] * len(numerators)
    return rate_ratio_interval((numerators, denominators), (ones, ones))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")
