"""The learning curve: what the fit says of curves whose law is known."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.records.head_schema import Point
from eval.records.learning_curve import fit_curve, held_out_lines, learning_line
from eval.records.results import read_curve, read_results, write_results
from eval.records.schema import Results
from tests.support.curves import constant, cosine, learning_curve


def points_of(lines: list[dict[str, Any]]) -> list[Point]:
    return [Point.model_validate(line) for line in lines]


def law(share: float) -> float:
    return 2.6 - 0.4 * float(share**-0.35)


@pytest.mark.parametrize(
    ("rate", "gain", "scatter"),
    [(constant, 0.0, 0.0), (constant, 0.0, 0.01), (cosine, 0.0, 0.01), (cosine, 0.15, 0.0), (cosine, 0.15, 0.01)],
)
def test_the_fit_gives_the_tau_of_twice_the_tokens(rate: Callable[[float], float], gain: float, scatter: float) -> None:
    """Also if a part of the gain is a learning rate's that falls."""
    points = points_of(learning_curve(lambda share: law(share) + gain * (1 - rate(share)), rate=rate, scatter=scatter))
    fit, end = fit_curve(points), gain * (1 - rate(1.0))
    tau, low, high = fit.predict(2 * fit.tokens)
    assert low < law(2) + end < high and high - low < 0.4
    assert tau == pytest.approx(law(2) + end, abs=0.01 if scatter == 0 else 0.08)


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        ({"tau": law}, "still learning: twice the tokens would give tau about 2.2"),
        ({"tau": lambda share: 2.4 - 0.001 * share**-0.5, "scatter": 0.002}, "near its end: twice the tokens would"),
        ({"tau": law, "scatter": 0.2}, None),
        ({"tau": law, "count": 3}, "the learning curve has 3 points, a fit needs 4: it does not say what more tokens"),
        ({"tau": law, "count": 1}, "the learning curve has 1 point, a fit needs 4"),
        ({"tau": law, "count": 0}, None),
    ],
)
def test_a_sentence_says_what_more_tokens_would_give_or_why_not(curve: dict[str, Any], said: str | None) -> None:
    line = learning_line(points_of(learning_curve(**curve)))
    assert line is None if said is None else line is not None and line.startswith(said), line


def test_nothing_is_fitted_to_estimates() -> None:
    points = points_of([point | {"is_estimate": True, "suites": {}} for point in learning_curve(law)])
    assert "is an estimate" in str(learning_line(points)) and not list(held_out_lines(points))


def test_four_times_the_tokens_are_foreseen() -> None:
    """The point at 630,000 tokens from the four up to 157,000, and the last one, here too low, from five."""
    lines = held_out_lines(points_of(learning_curve(lambda share: law(share) if share < 1 else 1.8)))
    assert [line.rpartition(", ")[2] for line in lines] == ["within the interval", "outside the interval"]
    (fallen,) = held_out_lines(points_of(learning_curve(law, rate=cosine, count=7)))
    assert "up to 250,000 tokens" in fallen and "measured, at 2% of the highest learning rate: 2.20" in fallen


def test_the_points_of_a_run_go_from_its_metrics_into_its_results(results: dict[str, Any], tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": 1}, {"kind": "eval", "step": 1, "tau": 1.5}, *learning_curve(law)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    points = read_curve(tmp_path / "metrics.jsonl")
    assert [(point.tokens, point.tau) for point in points] == [(p["tokens"], p["tau"]) for p in lines[2:]]
    assert "best_tau" not in points[0].model_dump()
    measured = Results.model_validate(results)
    measured.head.curve = points
    write_results(measured, tmp_path / "results.json")
    assert read_results(tmp_path / "results.json").head.curve == points
    assert read_curve(tmp_path / "none.jsonl") == []
