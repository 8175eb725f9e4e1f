"""Printed figures of measurements on a busy machine, for random figures of every kind."""

import io
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from eval.pages.card import model_card
from eval.pages.charts import head_charts
from eval.pages.html import render_page
from eval.pages.run_report import print_report
from eval.pages.texts import robust_text, speedup_text
from eval.records.figures_schema import Measurement
from eval.records.results import named_figures
from eval.records.schema import Results
from eval.records.speedup_checks import why_unreliable
from tests.support.measurements import measurement

BOUND = 1.05


def disturbed(rng: np.random.Generator) -> Measurement:
    """Return a setting with random figures, as of a machine that was interrupted at times."""
    tau, median = float(rng.uniform(1, 5)), float(rng.uniform(1, 20))
    step = {"mean": median * float(rng.uniform(1, 1.8)), "median": median}
    speedup = {name: tau * float(rng.uniform(0.2, 1.4)) for name in ("measured", "predicted", "ratio_of_medians")}
    return measurement(
        tau={"mean": tau, "ci95": None},
        baseline={"tokens_per_second": 1.0, "ms_per_token": median, "token_ms": {"p50": median}, "step_ms": step},
        speculative={"round_ms": step},
        speedup=speedup | {"ci95": None, "tokens": int(rng.integers(8, 400))},
    )


def test_no_printed_speedup_exceeds_tau() -> None:
    rng = np.random.default_rng(0)
    stated, impossible, withheld = 0, 0, 0
    for _ in range(200):
        m = disturbed(rng)
        assert m.speedup is not None and m.speedup.tokens is not None
        tau, true = m.tau.mean, m.speedup.measured
        impossible += true > BOUND * tau
        text = f"{speedup_text(m)} {robust_text(m) or ''}"
        assert all(float(found) <= BOUND * tau + 0.005 for found in re.findall(r"([\d.]+)x", text)), (text, tau)
        assert ("speedup" in named_figures(m)) == (why_unreliable(m) is None)
        if why_unreliable(m) is None:
            stated += 1
            assert m.speedup.tokens >= 64 and speedup_text(m) == f"{true:.2f}x"
        else:
            withheld += 1
            assert speedup_text(m) in ("not measured: the machine was busy", "not measured: fewer than 64 tokens")
    assert min(stated, impossible, withheld) > 20, (stated, impossible, withheld)


CHANGES: dict[str, dict[str, Any]] = {
    "speedup": {"speedup": {"measured": 7.6543}},
    "predicted": {"speedup": {"predicted": 7.6543}},
    "plain steps": {"baseline": {"step_ms": {"mean": 1.6, "median": 1.0}}},
    "rounds": {"speculative": {"round_ms": {"mean": 1.6, "median": 1.0}}},
    "cores": {"busy_cores": 1.9},
    "tokens": {"speedup": {"tokens": 63}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_unreliable_speedup_is_nowhere(change: str, results: dict[str, Any]) -> None:
    """Nor is a conclusion drawn from it."""
    for m in [part for whole in results["measurements"] for part in (whole, *whole["suites"].values())]:
        steady = {"mean": 1.0, "median": 1.0}
        m["tau"] = {"mean": 2.0, "ci95": None}
        m["baseline"] |= {"ms_per_token": 1.0, "token_ms": dict.fromkeys(("p50", "p95", "p99"), 1.0), "step_ms": steady}
        m["speculative"] |= {"round_ms": steady}
        m["speedup"] |= {"measured": 0.7654, "ci95": [0.7543, 0.7765], "predicted": 0.8, "tokens": 100}
        m["speedup"]["ratio_of_medians"] = 0.9123
        assert why_unreliable(Measurement.model_validate(m)) is None
        for name, value in CHANGES[change].items():
            m[name] = m[name] | value if isinstance(value, dict) else value
    results["auto"][0] |= {"measured": {}, "chosen": None, "unreliable": ["chain:2", "tree:2x2x4"]}
    results["auto"][0]["curve"][1] |= {"tokens": 2.0, "speedup": 7.6543}
    measured = Results.model_validate(results)
    console = Console(file=io.StringIO(), width=300)
    print_report(measured, console)
    charts = head_charts(measured.headline)
    assert isinstance(console.file, io.StringIO)
    for text in (console.file.getvalue(), render_page(measured, charts, None), model_card(measured)):
        assert not re.search(r"0\.77|0\.75|7\.65|plain decoding is faster|\S+ is chosen \(", text)
        assert ("fewer than 64 tokens" if change == "tokens" else "the machine was busy") in text
        assert ("ratio of medians 0.91x" in text) == (change != "tokens")
    assert not {"speedup", "round", "depth"} & {chart.name for chart in charts}
    assert "speedup" not in named_figures(measured.headline) and named_figures(measured.headline)["tau"] == 2.0
