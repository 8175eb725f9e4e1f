"""Measurements with figures that a test names."""

from typing import Any

from eval.records.figures_schema import Measurement
from eval.records.schema import Results
from heads.core.tree import parse_shape


def measurement(
    tree: str = "chain:3",
    temperature: float = 0.0,
    *,
    speedup: Any = 1.2,
    low: float | None = None,
    tau: Any = 4.0,
    **changes: Any,
) -> Measurement:
    """Return a setting over two prompts. `low`: lower end of the speedup's interval; the upper one is 0.1 above it."""
    shape = parse_shape(tree)
    times = {"tokens_per_second": 250.0, "ms_per_token": 4.0, "token_ms": {"p50": 4.0, "p95": 4.5, "p99": 5.0}}
    if isinstance(speedup, float):
        speedup = {"measured": speedup, "ci95": low and (low, speedup + 0.1), "predicted": speedup}
    if isinstance(tau, float):
        tau = {"mean": tau, "ci95": (tau - 0.2, tau + 0.3)}
    return Measurement.model_validate(
        {
            **{"tree": tree, "depth": shape.depth, "nodes": shape.nodes, "temperature": temperature, "rule": "match"},
            "exact": {"prompts": 2, "identical": 2, "divergences": []},
            "tau": tau,
            "alpha": [0.9, 0.8, 0.7, 0.6, None, *[None] * shape.depth][: shape.depth],
            "accepted_histogram": [3, 2, 2, 1, *[0] * shape.depth][: shape.depth + 1],
            **{"loop_share": 0.0, "tokens": 100, "undecoded": 0},
            "baseline": times,
            "speculative": {
                "breakdown_ms": {"draft": 1.0, "verify": 4.5, "accept": 0.1, "commit": 0.3},
                **{"plain_step_ms": 4.0, "tokens_per_second": 300.0},
            },
            "speedup": speedup,
            **changes,
        }
    )


def results_of(*measurements: Measurement, head: dict[str, Any] | None = None, **changes: Any) -> Results:
    """Return the results of one head, of which the first measurement is the headline."""
    settings = {"prompts": "gsm8k", "suites": ["gsm8k"], "prompts_hash": "0", "trees": ["chain:3"]}
    facts: dict[str, Any] = {"kind": "eagle3", "path": "runs/a/head", "sha256": None}
    numbers = dict.fromkeys(("num_prompts", "distinct_prompts", "max_new_tokens", "repeats"), 64)
    exacts = [m.exact for m in measurements]
    return Results.model_validate(
        {
            **{"schema_version": 1, "measured_at": "2026-11-03T00:00:00.000+00:00", "target": {"name": "org/target"}},
            **{"device": {"name": "CPU", "threads": 2}, "dtype": "float32", "versions": {"draftsmith": "abcdef0123"}},
            "settings": settings | numbers | {"batch_size": 1, "seed": 0},
            "heads": [facts | {"parameters": 5000, "aux_layer_ids": [], "config": {}, **(head or {})}],
            "exact": {
                "prompts": sum(exact.prompts for exact in exacts),
                "identical": sum(exact.identical or 0 for exact in exacts),
                "divergences": [d for exact in exacts for d in exact.divergences],
            },
            "measurements": list(measurements),
            **changes,
        }
    )
