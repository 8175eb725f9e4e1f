"""Learning curves of known shape, as the measurements of a run give them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def constant(share: float) -> float:
    return 1.0


def cosine(share: float) -> float:
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share))


def learning_curve(
    tau: Callable[[float], float], *, rate: Callable[[float], float] = constant, scatter: float = 0.0, count: int = 8
) -> list[dict[str, Any]]:
    """Return the lines `eval` of a run of a million tokens: `tau` and `rate` (of learning) as functions of the share of
    its tokens, three points to a factor of four, with a normal `scatter`; prompts are easy or hard all along."""
    drawn = np.random.default_rng(0)
    ease = drawn.normal(1, 0.1, 24)
    ease /= ease.mean()
    points = []
    for n in reversed(range(count)):
        share = 4 ** (-n / 3)
        mean = tau(share) + drawn.normal(0, scatter)
        pairs = [[round(200 * mean * each), 200] for each in ease]
        own = {"gsm8k": pairs[:12], "humaneval": pairs[12:]}
        points.append(
            {
                "kind": "eval",
                "step": round(1000 * share),
                "tokens": round(1e6 * share),
                "seconds": 300 * share,
                "lr": 1e-3 * rate(share),
                **figures(pairs),
                "suites": {suite: {**figures(part), "prompts": part} for suite, part in own.items()},
                "alpha": [0.4 + 0.3 * share, 0.3 + 0.2 * share, 0.2 * share or None],
                "is_estimate": False,
                "best_tau": 9.0,
            }
        )
    return points


def figures(pairs: Sequence[Sequence[int]]) -> dict[str, Any]:
    tau = sum(tokens for tokens, _ in pairs) / sum(rounds for _, rounds in pairs)
    return {"tau": tau, "ci95": [tau - 0.1, tau + 0.1]}
