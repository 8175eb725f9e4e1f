"""Printed figures of measurements on a busy machine."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from eval.pages.card import model_card
from eval.pages.charts import head_charts
from eval.pages.html import render_page
from eval.pages.run_report import print_report
from eval.pages.texts import speedup_cell
from eval.records.figures_schema import Measurement
from eval.records.results import named_figures
from eval.records.schema import Results
from eval.records.speedup_checks import why_unreliable
from tests.support.measurements import measurement

BUSY = "not measured: the machine was busy"
MEDIANS = "ratio of medians 1.50x"


@pytest.mark.parametrize(
    ("speedup", "mean", "said"),
    [
        ({"measured": 4.19}, 1.49, "4.19x"),
        ({"measured": 4.21}, 1.49, f"{BUSY}; {MEDIANS}"),
        ({"predicted": 4.21}, 1.49, f"{BUSY}; {MEDIANS}"),
        ({}, 1.51, f"{BUSY}; {MEDIANS}"),
        ({"measured": 4.21, "ratio_of_medians": 4.19}, 1.0, f"{BUSY}; ratio of medians 4.19x"),
        ({"measured": 4.21, "ratio_of_medians": 4.21}, 1.0, BUSY),
        ({"measured": 4.21, "tokens": 63}, 1.51, "not measured: fewer than 64 tokens"),
    ],
)
def test_no_printed_speedup_exceeds_tau(speedup: dict[str, Any], mean: float, said: str) -> None:
    """Here 4.0, by more than 5%, which is noise. `mean`: of rounds whose median is 1."""
    whole = {"measured": 1.5, "predicted": 1.5, "ratio_of_medians": 1.5, "ci95": None, "tokens": 64} | speedup
    m = measurement(
        tau={"mean": 4.0, "ci95": None}, speculative={"round_ms": {"mean": mean, "median": 1}}, speedup=whole
    )
    assert speedup_cell(m) == said
    assert ("speedup" in named_figures(m)) == (why_unreliable(m) is None) == (said == "4.19x")


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
