"""The figures behind the plots against depth."""

from typing import Any

import pytest

from eval.curves import HEIGHT, WIDTH, depth_curves, latency_chart, nice_ticks, speedup_chart


def measurement(tree: str, depth: int, nodes: int, speed: float, temperature: float = 0.0) -> dict[str, Any]:
    spread = {"p50": 4.0 / speed, "p95": 9.0, "p99": 12.0}
    return {
        "tree": tree,
        "depth": depth,
        "nodes": nodes,
        "temperature": temperature,
        "speedup": {"measured": speed, "ci95": [speed - 0.2, speed + 0.1]},
        "speculative": {"token_ms": spread},
        "baseline": {"token_ms": {"p50": 4.0, "p95": 4.5, "p99": 5.0}},
    }


def results(**changes: Any) -> dict[str, Any]:
    measured = [
        measurement("chain:2", 2, 3, 1.2),
        measurement("chain:4", 4, 5, 1.5),
        measurement("tree:4x2x8", 4, 8, 1.6),
        measurement("chain:4", 4, 5, 0.7, temperature=1.0),
    ]
    return {"temperature": 0.0, "measurements": measured, **changes}


def test_settings_of_the_headlines_temperature_are_drawn_at_their_depth() -> None:
    curves = depth_curves(results())
    assert curves is not None and curves.deepest == curves.deepest_known == 4
    assert [(dot.tree, round(dot.at), dot.chain) for dot in curves.dots] == [
        *(("chain:2", 2, True), ("chain:4", 4, True)),
        ("tree:4x2x8", 4, False),
    ]
    assert curves.dots[1].at < 4 < curves.dots[2].at, "two of one depth stand beside each other"
    chart = speedup_chart(curves)
    heights = [mark["y"] for mark in chart["marks"]]
    assert heights == sorted(heights, reverse=True), "faster is higher"
    for mark in chart["marks"]:
        bottom, top = mark["ends"]
        assert HEIGHT >= bottom >= mark["y"] >= top >= 0 and 0 < mark["x"] < WIDTH
    assert chart["lines"] == [] and [label for _, label in chart["x_ticks"]] == ["1", "2", "3", "4"]


def test_the_cost_models_best_of_each_depth_is_a_line() -> None:
    points = [("chain:1", 1, 1, 1.1), ("chain:6", 6, 1, 1.4), ("a", 2, 2, 1.2), ("b", 2, 4, 1.3), ("c", 3, 2, 1.25)]
    curve = [{"tree": t, "depth": d, "width": w, "speedup": s} for t, d, w, s in points]
    curves = depth_curves(results(auto=[{"temperature": 1.0, "curve": []}, {"temperature": 0.0, "curve": curve}]))
    assert curves is not None and (curves.deepest, curves.deepest_known) == (4, 6)
    assert curves.model == {"chain": [(1, 1.1), (6, 1.4)], "tree": [(2, 1.3), (3, 1.25)]}
    chart = speedup_chart(curves)
    assert [line["kind"] for line in chart["lines"]] == ["chain", "tree"]
    assert [label for _, label in latency_chart(curves)["x_ticks"]] == ["plain", "1", "2", "3", "4"]


def test_latency_reaches_from_the_median_to_the_99th_percentile() -> None:
    curves = depth_curves(results())
    assert curves is not None
    chart = latency_chart(curves)
    assert [mark["kind"] for mark in chart["marks"]] == ["faded", "chain", "chain", "tree"]
    for mark in chart["marks"]:
        assert mark["ends"][0] == mark["y"] > mark["tick"] > mark["ends"][1] >= 0
    assert "median 4.00 ms, 95% within 4.50 ms, 99% within 5.00 ms" in chart["marks"][0]["title"]


@pytest.mark.parametrize("reason", ["failed audit", "one setting", "older results"])
def test_nothing_is_drawn_of_too_little(reason: str) -> None:
    given = results()
    if reason == "failed audit":
        for m in given["measurements"]:
            m["speedup"] = None
    elif reason == "one setting":
        del given["measurements"][1:3]
    else:
        del given["measurements"][0]["depth"]
    assert depth_curves(given) is None


def test_ticks_are_round_and_span_the_values() -> None:
    assert nice_ticks(0.62, 1.2) == pytest.approx([0.6, 0.8, 1.0, 1.2])
    assert nice_ticks(0, 203) == [0, 50, 100, 150, 200, 250]
    for low, high in ((0.0, 0.004), (0.97, 1.03), (1.0, 1.0), (3, 900)):
        found = nice_ticks(low, high)
        assert found[0] <= low + 1e-9 and found[-1] >= high - 1e-9 and 2 <= len(found) <= 8
