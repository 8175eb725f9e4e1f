"""Reliability of a measured speedup: one rule for every place that prints one or concludes from one.

A round costs at least one pass of the target, so a speedup is at most tau. A larger figure, plain steps that did not
all take the same time, or others that kept the cores busy when the measurement began show that something else used the
machine. What is not reliable is stored but not printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eval.records.figures_schema import Measurement

BUSY = 1.5
"""Ratio of mean to median of the time of a step above which something else used the machine. Quiet machines give 1.0
to 1.2."""
BOUND = 1.05
"""Ratio of a speedup to tau above which it cannot be true. Above 1, because times have noise."""
NOISE = 1.1
"""Ratio up to which two measurements of one speedup differ on a quiet machine, apart from the prompts."""
MIN_TOKENS = 64
"""Number of timed tokens below which there is no speedup."""
AUDIT_FAILED = "the audit failed"
MACHINE_BUSY = "the machine was busy"
NO_BASELINE = "no plain server was measured"
HIDDEN = "the server keeps tokens back"
TOO_FEW_TOKENS = f"fewer than {MIN_TOKENS} tokens"


def why_unreliable(figures: Measurement) -> str | None:
    """Return the reason why the speedup of a setting may not be printed, or None if it is reliable."""
    speedup = figures.speedup
    if figures.speculative.hidden:
        return HIDDEN
    if speedup is None:
        return NO_BASELINE if figures.baseline is None and not figures.exact.divergences else AUDIT_FAILED
    if math.isnan(speedup.measured) or (speedup.tokens is not None and speedup.tokens < MIN_TOKENS):
        return TOO_FEW_TOKENS
    believable = all(is_believable(value, figures.tau.mean) for value in (speedup.measured, speedup.predicted))
    return None if believable and not is_uneven(figures) and figures.busy_cores is None else MACHINE_BUSY


def verdict_of(figures: Measurement) -> str | None:
    """Return what a speedup and its 95% interval allow to be said of a draft, or None if the speedup is not reliable:
    `pays` or `does not pay` if the whole interval is on one side of 1; if it holds 1, or there is none, `may pay` for a
    speedup above 1, else `not decided`."""
    if why_unreliable(figures) is not None or figures.speedup is None:
        return None
    low, high = figures.speedup.ci95 or (-math.inf, math.inf)
    if low > 1 or high < 1:
        return "pays" if low > 1 else "does not pay"
    return "may pay" if figures.speedup.measured > 1 else "not decided"


def contradicts(figures: Measurement) -> bool:
    """Return True if the predicted speedup cannot be reconciled with the measured one: it exceeds tau, or it is further
    from the interval than a quiet machine's noise."""
    speedup = figures.speedup
    if speedup is None or math.isnan(speedup.predicted):
        return False
    low, high = speedup.ci95 or (speedup.measured, speedup.measured)
    return speedup.predicted > figures.tau.mean or not low / NOISE <= speedup.predicted <= NOISE * high


def is_believable(speedup: float, tau: float) -> bool:
    """Return False for a speedup that exceeds tau by more than noise. One that is missing exceeds nothing."""
    return math.isnan(speedup) or speedup <= BOUND * tau


def is_steady(seconds: Sequence[float]) -> bool:
    """Return False if some steps took so much longer than the median that something else used the machine."""
    return fmean(seconds) <= BUSY * median(seconds)


def is_uneven(figures: Measurement) -> bool:
    _, mean, median = most_uneven(figures)
    return mean > BUSY * median


def most_uneven(figures: Measurement) -> tuple[str, float, float]:
    """Return a kind of step with the mean and the median of its milliseconds: the kind where they differ most."""
    assert figures.baseline is not None
    plain, rounds = figures.baseline, figures.speculative.round_ms
    kinds = [
        ("plain decoding of a token", plain.ms_per_token, plain.token_ms.p50),
        ("a plain step", plain.step_ms.mean, plain.step_ms.median),
    ]
    if figures.lookup is None:  # rounds of two drafts are of two kinds
        kinds.append(("a round", rounds.mean, rounds.median))
    known = [(kind, mean, median) for kind, mean, median in kinds if mean > 0 and median > 0]
    return max(known, key=lambda step: step[1] / step[2], default=("", 0.0, 0.0))


def headline_index(measurements: Sequence[Measurement]) -> int:
    """Return the index of the headline setting: the best one at the first temperature (`best_index`), or the first
    setting if none is reliable or the audit failed there."""
    candidates = [i for i, m in enumerate(measurements) if m.temperature == measurements[0].temperature]
    if any(measurements[i].speedup is None for i in candidates):
        return 0
    best = best_index([measurements[i] for i in candidates])
    return 0 if best is None else candidates[best]


def served_index(measurements: Sequence[Measurement]) -> int:
    """Return the index of the setting that a command serves: the best one at the first temperature at which a draft
    may pay, or the headline; where no speedup is reliable, the one with the highest tau."""
    for temperature in dict.fromkeys(m.temperature for m in measurements):
        candidates = [i for i, m in enumerate(measurements) if m.temperature == temperature]
        best = best_index([measurements[i] for i in candidates])
        if best is not None and verdict_of(measurements[candidates[best]]) in ("pays", "may pay"):
            return candidates[best]
    if best_index(measurements) is None:
        return max(range(len(measurements)), key=lambda i: measurements[i].tau.mean)
    return headline_index(measurements)


def best_index(measurements: Sequence[Measurement]) -> int | None:
    """Return the index of the setting with the best reliable speedup, None without one: the highest of those that pay,
    else the highest."""
    ranks = {
        i: (verdict_of(m) == "pays", m.speedup.measured)
        for i, m in enumerate(measurements)
        if m.speedup is not None and verdict_of(m) is not None
    }
    return max(ranks, key=ranks.__getitem__, default=None)
