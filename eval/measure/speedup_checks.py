"""Reliability of a measured speedup: one rule for every place that prints one or concludes from one.

A round costs at least one pass of the target, so a speedup is at most tau. A larger figure, or plain steps that did not
all take the same time, show that something else used the machine. What is not reliable is stored but not printed.
"""

import math
from collections.abc import Sequence
from typing import Any

BUSY = 1.5
"""Ratio of mean to median of the time of a step above which something else used the machine. Quiet machines give 1.0
to 1.2."""
BOUND = 1.05
"""Ratio of a speedup to tau above which it cannot be true. Above 1, because times have noise."""
FEWEST_TOKENS = 64
"""Number of timed tokens below which there is no speedup."""
AUDIT_FAILED = "the audit failed"
MACHINE_BUSY = "the machine was busy"
NO_BASELINE = "no plain server was measured"
TOO_FEW_TOKENS = f"fewer than {FEWEST_TOKENS} tokens"


def why_unreliable(figures: dict[str, Any]) -> str | None:
    """Return the reason why the speedup of a setting may not be printed, or None if it is reliable."""
    speedup = figures["speedup"]
    if speedup is None:
        return (
            NO_BASELINE if figures.get("baseline", {}) is None and not figures["exact"]["divergences"] else AUDIT_FAILED
        )
    measured = speedup["measured"]
    if measured is None or math.isnan(measured) or speedup.get("tokens", FEWEST_TOKENS) < FEWEST_TOKENS:
        return TOO_FEW_TOKENS
    believable = all(is_believable(speedup.get(name), figures["tau"]["mean"]) for name in ("measured", "predicted"))
    return None if believable and not is_uneven(figures) else MACHINE_BUSY


def is_believable(speedup: float | None, tau: float | None) -> bool:
    """Return False for a speedup that exceeds tau by more than noise. One that is missing exceeds nothing."""
    return speedup is None or math.isnan(speedup) or (tau is not None and speedup <= BOUND * tau)


def is_uneven(figures: dict[str, Any]) -> bool:
    _, mean, median = most_uneven(figures)
    return mean > BUSY * median


def most_uneven(figures: dict[str, Any]) -> tuple[str, float, float]:
    """Return a kind of step with the mean and the median of its milliseconds: the kind where they differ most."""
    plain, rounds = figures["baseline"], figures.get("speculative", {}).get("round_ms")
    kinds = [("plain decoding of a token", plain["ms_per_token"], plain.get("token_ms", {}).get("p50"))]
    for kind, times in (("a plain step", plain.get("step_ms")), ("a round", rounds)):
        kinds += [(kind, times["mean"], times["median"])] if times else []
    known = [(kind, mean, median) for kind, mean, median in kinds if mean and median and not math.isnan(median)]
    return max(known, key=lambda found: found[1] / found[2], default=("", 0.0, 0.0))


def headline(measurements: Sequence[dict[str, Any]]) -> int:
    """Return the index of the headline setting: the fastest reliable one at the first temperature, or the first setting
    if none is reliable or the audit failed there."""
    candidates = [i for i, m in enumerate(measurements) if m["temperature"] == measurements[0]["temperature"]]
    if any(measurements[i]["speedup"] is None for i in candidates):
        return 0
    reliable = [i for i in candidates if why_unreliable(measurements[i]) is None]
    return max(reliable, key=lambda i: measurements[i]["speedup"]["measured"], default=0)
