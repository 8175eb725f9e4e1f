"""The charts of reports: what they draw, and that it can be read wherever they stand."""

import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from eval.pages.charts import head_charts
from eval.pages.drawing import COLOURS, Chart, drawn, inline_svg, write_charts
from eval.pages.html import DARK
from eval.pages.training_charts import training_charts
from eval.records.figures_schema import Measurement
from eval.records.head_schema import Point
from tests.support.curves import learning_curve
from tests.support.measurements import measurement

BINS = [
    {"from": 64 << n, "to": 128 << n, "rounds": 9, "mean": 3 - n / 5, "ci95": [2.9 - n / 5, 3.1 - n / 5] if n else None}
    for n in range(1, 11)
]


def setting(speed: float | None = 1.5) -> Measurement:
    return measurement("chain:4", speedup=speed, low=speed and speed - 0.2, tau=2.4, tau_by_position=BINS)


def curve(*arguments: Any, **settings: Any) -> list[Point]:
    return [Point.model_validate(line) for line in learning_curve(*arguments, **settings)]


def every_chart() -> list[Chart]:
    log = [{"kind": "train", "step": step, "loss": 9 / step} for step in range(1, 13)]
    training = training_charts({"": curve(lambda share: 2 + share, count=5)}, log)
    many = {f"eagle3, a-run-with-a-long-name-{n}": curve(lambda share: 2.0, count=2) for n in range(6)}
    runs = [replace(chart, name="curve-runs") for chart in training_charts(many)]
    return [*head_charts(setting()), *training, *runs]


CHARTS = pytest.mark.parametrize("chart", every_chart(), ids=lambda chart: chart.name)


def test_every_kind_of_chart_is_drawn() -> None:
    names = {"round", "acceptance", "position", "loss", "curve", "curve-depth", "curve-runs"}
    assert {chart.name for chart in every_chart()} == names


def test_no_times_are_drawn_of_a_failed_audit() -> None:
    assert [chart.name for chart in head_charts(setting(None))] == ["acceptance", "position"]


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
        texts = [*axes.texts, *ticks, axes.xaxis.label, *figure.texts, *(legend.get_texts() if legend else ())]
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
    assert sizes and min(sizes) * 330 / width >= 10  # in the pixels that a chart has on a phone of 390
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
