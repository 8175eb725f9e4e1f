"""The charts of training: tau and acceptance over training tokens, a line a run, and the loss over the steps."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from eval.pages.charts import CYCLE, draw_legend
from eval.pages.drawing import COLOURS, Chart
from eval.pages.texts import count, sentence
from eval.records.head_schema import Point
from eval.records.learning_curve import falls, learning_line

MIN_POINTS = 4
"""Number of points below which the loss is no curve."""
MAX_LOSS = 1e15
"""Absolute value from which a loss is not drawn. Infinity is not drawn either."""
MAX_POINTS = 300
"""Maximum number of points of the loss. Longer records are averaged."""
MAX_TICKS = 6
STYLES = ("-", "--", ":")
"""Lines of the first series in the colours of `CYCLE`, of the next ones, and so on."""
APART = 1.02
"""Factor between the places of points of different series at the same tokens."""
FAINT = 0.3
"""Opacity of the line of the deepest draft token."""
MAX_NAME = 30
"""Maximum number of letters of a run's name."""
Line = list[tuple[int, float, tuple[float, float] | None]]
"""Tokens, a figure and its interval."""


def training_charts(curves: Mapping[str, Sequence[Point]], log: Sequence[Mapping[str, object]] = ()) -> list[Chart]:
    """Return the charts of the learning curves of runs by name: tau, of a single run also by suite, and its acceptance
    by depth; and of the loss in the `log` (metrics.jsonl), if there is one."""
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    charts = []
    if len(curves) == 1:
        ((_, points),) = curves.items()
        series: dict[str, Line] = {"all prompts": line_of(points)}
        if len(points[0].suites) > 1:
            for suite in points[0].suites:
                series[suite] = [(p.tokens, p.suites[suite].tau, p.suites[suite].ci95) for p in points]
        note = "Share of rounds that accepted the k-th draft token, where those before it were, over training."
        draw = partial(draw_depths, points=points)
        charts.append(Chart("curve-depth", "Acceptance by depth over training tokens", note, draw))
    else:
        series = {name: line_of(points) for name, points in curves.items()}
    if series:
        height = 2.7 + 0.2 * len(series) * (len(series) > 1)
        draw = partial(draw_lines, series=series)
        charts.insert(0, Chart("curve", "tau over training tokens", curve_note(curves), draw, height, folded=False))
    losses = [(record.get("step"), record.get("loss")) for record in log if record.get("kind") == "train"]
    known = [
        (step, loss)
        for step, loss in losses
        if type(step) is int and isinstance(loss, int | float) and max(abs(step), abs(loss)) < MAX_LOSS
    ]
    if len(known) >= MIN_POINTS:
        note = "Loss of the head over the training steps, all depths together."
        charts.append(Chart("loss", "Training loss", note, partial(draw_loss, points=known)))
    return charts


def line_of(points: Sequence[Point]) -> Line:
    return [(point.tokens, point.tau, point.ci95) for point in points]


def curve_note(curves: Mapping[str, Sequence[Point]]) -> str:
    """Return how the points were measured, and what more tokens would give each run."""
    parts = ["Measured on held-out prompts during training, with 95% intervals over prompts."]
    if all(point.is_estimate for points in curves.values() for point in points):
        parts = ["Estimated by the training step on training text."]
    lines = {name: line for name, points in curves.items() if (line := learning_line(points)) is not None}
    parts += [sentence(line) if len(curves) == 1 else f"{name}: {line}." for name, line in lines.items()]
    if any(falls(points)[-1] > 0.5 for points in curves.values()):
        parts.append(
            "Points before the end were measured at a higher learning rate, and so are lower than the end of "
            "a shorter run; the fit allows for that."
        )
    return " ".join(parts)


def draw_lines(axes: Axes, *, series: Mapping[str, Line]) -> None:
    for n, (name, line) in enumerate(series.items()):
        colour = COLOURS[CYCLE[n % len(CYCLE)]]
        style = STYLES[n // len(CYCLE) % len(STYLES)]
        places = [tokens * APART ** (n - len(series) / 2) for tokens, _, _ in line]
        for place, (_, value, interval) in zip(places, line, strict=True):
            axes.plot([place, place], interval or (value, value), color=colour, lw=1.2)
        values = [value for _, value, _ in line]
        axes.plot(places, values, f"o{style}", color=colour, lw=1.8, ms=4.5, label=shortened(name))
    axes.margins(y=0.1)
    set_token_axis(axes, [tokens for line in series.values() for tokens, _, _ in line])
    if len(series) > 1:
        draw_legend(axes, axes.get_legend_handles_labels()[0], columns=2 if max(map(len, series)) < 15 else 1)


def shortened(name: str) -> str:
    """Return a name, shortened in its middle: its end names the setting."""
    head = MAX_NAME // 3
    return name if len(name) <= MAX_NAME else f"{name[:head]}…{name[head + 1 - MAX_NAME :]}"


def draw_depths(axes: Axes, *, points: Sequence[Point]) -> None:
    """Draw a line for each depth that a round has reached, the deeper the fainter."""
    by_depth = list(zip(*(point.alpha for point in points), strict=True))
    depths = [depth for depth, alpha in enumerate(by_depth) if {*alpha} != {None}]
    for depth in depths:
        line = [(p.tokens, value) for p, value in zip(points, by_depth[depth], strict=True) if value is not None]
        opacity = 1 - (1 - FAINT) * depth / max(len(depths) - 1, 1)
        label = f"k = {depth + 1}" if depth in (depths[0], depths[-1]) else "_"
        look: dict[str, Any] = {"color": COLOURS["draft"], "alpha": opacity, "lw": 1.8, "ms": 4.5}
        axes.plot(*zip(*line, strict=True), "o-", label=label, **look)
    axes.set_ylim(0, 1.02)
    set_token_axis(axes, [point.tokens for point in points])
    draw_legend(axes, axes.get_legend_handles_labels()[0], columns=2)


def set_token_axis(axes: Axes, tokens: Sequence[int]) -> None:
    """Make the axis below one of tokens, in their logarithm."""
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.margins(x=0.06)
    low = max(min(tokens), 1)
    high = max(tokens)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10**power for power in powers for step in steps if 0.9 * low <= step * 10**power <= 1.1 * high]
        if len(ticks) <= MAX_TICKS:
            break
    if len(ticks) < 2:  # a short range between two round numbers
        ticks = sorted({low, high})
    axes.set_xticks(ticks, [count(tick).replace(".0", "") for tick in ticks])
    axes.set_xlabel("training tokens")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    draw_grid(axes)


def draw_loss(axes: Axes, *, points: Sequence[tuple[int, float]]) -> None:
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    steps = []
    values = []
    for group in groups:
        steps.append(fmean(step for step, _ in group))
        values.append(fmean(value for _, value in group))
    axes.plot(steps, values, color=COLOURS["draft"], lw=1.8)
    axes.margins(x=0.05, y=0.08)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    draw_grid(axes)


def draw_grid(axes: Axes) -> None:
    axes.grid(axis="y", color=COLOURS["line"], lw=0.6)
    axes.set_axisbelow(True)
