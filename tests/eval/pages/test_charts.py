"""The charts of reports: what they draw, and that it can be read wherever they stand."""

import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from eval.measure.schema import Measurement, Point, Results
from eval.pages.charts import head_charts, speedups_along
from eval.pages.drawing import COLOURS, Chart, drawn, inline_svg, write_charts
from eval.pages.html import DARK
from eval.pages.training import training_charts
from tests.curves import learning_curve
from tests.measurements import measurement, results_of

PHONE = 330
"""Pixels that a chart has on a phone of 390."""


BINS = [
    {"from": 64 << n, "to": 128 << n, "rounds": 9, "mean": 3 - n / 5, "ci95": [2.9 - n / 5, 3.1 - n / 5] if n else None}
    for n in range(1, 11)
]


def setting(tree: str, speed: float | None, temperature: float = 0.0, **changes: Any) -> Measurement:
    low = speed and speed - 0.2
    return measurement(tree, temperature, speedup=speed, low=low, tau=2.4, tau_by_position=BINS, **changes)


def depths(**changes: Any) -> Results:
    """Chains and a tree, of which the second is the headline."""
    speeds = {"chain:2": 1.2, "chain:4": 1.5, "tree:4x2x8": 1.6, "chain:3": 1.4}
    settings = [setting(tree, speed) for tree, speed in speeds.items()]
    return results_of(*settings, setting("chain:4", 0.7, 1.0), **{"chosen": 1, **changes})


def points(tree: str = "chain:2", **changes: Any) -> Results:
    """Three batch sizes at three contexts."""
    places = [{"batch_size": batch, "context": context} for batch in (1, 2, 8) for context in (64, 512, 1024)]
    return results_of(*(setting(tree, 1.2, **place) for place in places), **changes)


def server(name: str) -> dict[str, Any]:
    return {"name": name, "url": "", "model": "", "plain_url": None}


def curve(*arguments: Any, **settings: Any) -> list[Point]:
    return [Point.model_validate(line) for line in learning_curve(*arguments, **settings)]


def every_chart() -> list[Chart]:
    one = head_charts(depths())
    log = [{"kind": "train", "step": step, "loss": 9 / step} for step in range(1, 13)]
    training = training_charts({"": curve(lambda share: 2 + share, count=5)}, log)
    many = {f"eagle3, a-run-with-a-long-name-{n}": curve(lambda share: 2.0, count=2) for n in range(6)}
    runs = [replace(chart, name="curve-runs") for chart in training_charts(many)]
    served = points(server=server("vLLM 0.32.0"))
    several = [chart for chart in head_charts(points(), [served]) if chart.name in ("batch-size", "context")]
    return [*one, *training, *runs, *several]


CHARTS = pytest.mark.parametrize("chart", every_chart(), ids=lambda chart: chart.name)


def test_every_kind_of_chart_is_drawn() -> None:
    names = {"round", "acceptance", "position", "loss", "batch-size", "context"}
    assert {chart.name for chart in every_chart()} == {*names, "curve", "curve-depth", "curve-runs"}


def test_nothing_is_drawn_of_a_failed_audit_or_of_few_points() -> None:
    failed = results_of(*(setting(f"chain:{depth}", None) for depth in (2, 3, 4)))
    assert [chart.name for chart in head_charts(failed)] == ["acceptance", "position"]
    few = results_of(measurement("chain:2"), measurement("chain:4"))
    assert [chart.name for chart in head_charts(few)] == ["round", "acceptance"]


def test_a_speedup_stands_beside_the_servers_at_the_same_setting() -> None:
    """Of several measurements of one place, the newest; a server may draft another length."""
    servers = [points("chain:7", server=server("vLLM")), points(server=server("vLLM")), depths(server=server("SGLang"))]
    found = speedups_along("batch_size", points(), servers)
    assert {name: [place for place, _ in line] for (name, _), line in found.items()} == {
        "here: chain:2": [1, 2, 8],
        "vLLM: chain:7": [1, 2, 8],
        "vLLM: chain:2": [1, 2, 8],
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
