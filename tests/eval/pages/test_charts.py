"""The charts of reports: what they draw, and that it can be read wherever they stand."""

import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from eval.pages.charts import head_charts, remarks, row_charts, speedups_along
from eval.pages.drawing import COLOURS, Chart, drawn, inline_svg, write_charts
from eval.pages.html import DARK
from eval.pages.training import training_charts
from tests.curves import learning_curve

PHONE = 330
"""Pixels that a chart has on a phone of 390."""


def measurement(tree: str, depth: int, nodes: int, speed: float, temperature: float = 0.0) -> dict[str, Any]:
    spread = {"p50": 4.0 / speed, "p95": 9.0, "p99": 12.0}
    phases = {"draft": 1.0, "verify": 4.5, "accept": 0.1, "commit": 0.3}
    return {
        "tree": tree,
        "depth": depth,
        "nodes": nodes,
        "temperature": temperature,
        "tau": {"mean": 2.4, "ci95": [2.2, 2.7]},
        "alpha": [0.9, 0.8, 0.7, 0.6, None][:depth],
        "accepted_histogram": [3, 2, 2, 1, 0][: depth + 1],
        "tau_by_position": [
            {"from": 64 << n, "to": 128 << n, "mean": 3 - n / 5, "ci95": [2.9 - n / 5, 3.1 - n / 5] if n else None}
            for n in range(1, 11)
        ],
        "speedup": {"measured": speed, "ci95": [speed - 0.2, speed + 0.1], "predicted": speed},
        "speculative": {
            "tokens_per_second": 250.0 * speed,
            "token_ms": spread,
            "breakdown_ms": phases,
            "plain_step_ms": 4.0,
        },
        "baseline": {"tokens_per_second": 250.0, "token_ms": {"p50": 4.0, "p95": 4.5, "p99": 5.0}, "ms_per_token": 4.0},
    }


def results(**changes: Any) -> dict[str, Any]:
    measured = [
        measurement("chain:2", 2, 3, 1.2),
        measurement("chain:4", 4, 5, 1.5),
        measurement("tree:4x2x8", 4, 8, 1.6),
        measurement("chain:3", 3, 4, 1.4),
        measurement("chain:4", 4, 5, 0.7, temperature=1.0),
    ]
    return {**measured[1], "measurements": measured, "settings": {"batch_size": 1}, "head": {}, **changes}


def at_points(**more: Any) -> dict[str, Any]:
    """Three batch sizes at three contexts."""
    places = [{"batch_size": batch, "context": context} for batch in (1, 2, 8) for context in (64, 512, 1024)]
    measured = [measurement("chain:2", 2, 3, 1.2) | place for place in places]
    return {**measured[0], "measurements": measured, "settings": {"batch_size": 1}, **more}


def rows(*suites: str) -> list[tuple[str, list[Any]]]:
    """Six heads in some suites."""
    dots: list[Any] = [(suite, 1.2 + n, [1.0 + n, 1.3 + n] if n else None) for n, suite in enumerate(suites)]
    return [(f"{'a-long-name-' * 4}{n}, chain:5, greedy", dots) for n in range(6)]


def every_chart() -> list[Chart]:
    one = head_charts(results())
    log = [{"kind": "train", "step": step, "loss": 9 / step} for step in range(1, 13)]
    training = training_charts({"": learning_curve(lambda share: 2 + share, count=5)}, log)
    many = {f"eagle3, a-run-with-a-long-name-{n}": learning_curve(lambda share: 2.0, count=2) for n in range(6)}
    runs = [replace(chart, name="curve-runs") for chart in training_charts(many)]
    served = at_points(server={"name": "vLLM 0.32.0"})
    several = [chart for chart in head_charts(at_points(), [served]) if chart.name in ("batch-size", "context")]
    suites = replace(row_charts(rows("gsm8k", "humaneval", "mt_bench"), [])[0], name="compare-suites")
    return [*one, *training, *runs, *several, *row_charts(rows("gsm8k"), rows("gsm8k")), suites]


CHARTS = pytest.mark.parametrize("chart", every_chart(), ids=lambda chart: chart.name)


def test_every_kind_of_chart_is_drawn() -> None:
    names = {"depth", "round", "acceptance", "tokens", "position", "loss", "batch-size", "context"}
    names |= {"compare-speedup", "compare-tau", "compare-suites", "curve", "curve-depth", "curve-runs"}
    assert {chart.name for chart in every_chart()} == names


def test_nothing_is_drawn_of_a_failed_audit() -> None:
    given = results()
    for m in (given, *given["measurements"]):
        m["speedup"] = None
    assert [chart.name for chart in head_charts(given)] == ["acceptance", "tokens", "position"]


def test_few_points_are_a_sentence() -> None:
    bins = results()["tau_by_position"][:2]
    few = results(tau_by_position=bins, measurements=results()["measurements"][:2])
    names = {chart.name for chart in head_charts(few)}
    assert not names & {"position", "depth"} and "acceptance" in names
    (position,) = remarks(few)
    assert position == "tau by position in the text (chain:4, greedy): 2.80 from token 128 on, 2.60 from token 256 on"


def test_a_speedup_stands_beside_the_servers_at_the_same_setting() -> None:
    """Of several measurements of one place, the newest; a server may draft another length."""
    servers = [at_points(server={"name": "vLLM"}), at_points(server={"name": "vLLM"}), results()]
    servers[0]["measurements"] = [{**m, "tree": "chain:7", "depth": 7} for m in servers[0]["measurements"]]
    servers[2] |= {"server": {"name": "SGLang"}, "measurements": [measurement("chain:2", 2, 3, 9.0)]}
    found = speedups_along("batch_size", at_points(), servers)
    assert found is not None and {name: [place for place, _ in own] for (name, _), own in found.items()} == {
        name: [1, 2, 8] for name in ("here: chain:2", "vLLM: chain:7", "vLLM: chain:2")
    }


@CHARTS
def test_nothing_is_cut_and_no_text_stands_on_another(chart: Chart) -> None:
    with drawn(chart, "eagle3 on a-target; 16 prompts of python-heldout, 48 new tokens, batch 1; AMD EPYC") as figure:
        FigureCanvasAgg(figure)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        for line in axes.lines:
            if line.get_marker() in ("o", "_") and line.get_clip_on():
                places = axes.transData.transform(np.asarray(line.get_xydata()))
                reach = line.get_markersize() / 2 * figure.dpi / 72
                box = axes.bbox
                assert (places[:, 0] - reach >= box.x0).all() and (places[:, 0] + reach <= box.x1).all()
                if line.get_marker() == "o":
                    assert (places[:, 1] - reach >= box.y0 - 1).all() and (places[:, 1] + reach <= box.y1 + 1).all()
        legend = axes.get_legend()
        first, last = sorted(axes.get_xlim())
        ticks = [label for label in axes.get_xticklabels() if first <= label.get_position()[0] <= last]
        texts = [*axes.texts, *ticks, axes.xaxis.label, *figure.texts]
        texts += legend.get_texts() if legend else []
        boxes = {t.get_text(): t.get_window_extent() for t in texts if t.get_text()}
        for text, box in boxes.items():
            inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
            assert inside, f"{text!r} leaves the figure"
            over = [other for other, place in boxes.items() if other != text and box.overlaps(place)]
            assert not over, f"{text!r} stands on {over}"


@CHARTS
def test_on_a_page_a_chart_is_of_its_colours_alone_and_can_be_read_on_a_phone(chart: Chart) -> None:
    svg = inline_svg(chart)
    width = float(re.findall(r'viewBox="0 0 ([\d.]+)', svg)[0])
    sizes = {float(size) for size in re.findall(r"font(?:-size)?: [^;]*?([\d.]+)px", svg)}
    assert sizes and min(sizes) * PHONE / width >= 10
    assert not re.findall(r"#[0-9a-f]{6}", svg) and set(re.findall(r"var\(--(\w+)\)", svg)) <= COLOURS.keys()
    assert "http" not in svg and "<script" not in svg and escape(chart.note) in svg
    assert svg == inline_svg(chart), "equal results give equal pages"


def test_charts_on_one_page_share_no_ids_and_every_colour_has_its_dark_form() -> None:
    found = [set(re.findall(r'\bid="([^"]*)"', inline_svg(chart))) for chart in every_chart()]
    assert sum(map(len, found)) == len(set.union(*found))
    assert DARK.keys() == COLOURS.keys() and len(set(COLOURS.values())) == len(COLOURS)


def test_a_chart_by_itself_says_what_it_is_of(tmp_path: Path) -> None:
    chart = next(chart for chart in every_chart() if chart.name == "acceptance")
    caption = "eagle3 on a $target$; 16 prompts of <here>"
    files = write_charts([chart], caption, tmp_path)
    assert [file.name for file in files] == ["acceptance.png", "acceptance.svg"]
    text = " ".join(re.findall(r">([^<]*)</text>", files[1].read_text()))
    assert "eagle3 on a $target$; 16 prompts of &lt;here&gt;" in text and chart.title in text
    assert files[0].read_bytes().startswith(b"\x89PNG")
    before = [file.read_bytes() for file in files]
    assert before == [file.read_bytes() for file in write_charts([chart], caption, tmp_path)]
