"""The charts of a report on one head."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from eval.measure.schema import Measurement, Results
from eval.pages.drawing import COLOURS, FONT_SIZE, Chart
from eval.pages.format import number, percent, reached, sampling_text, setting_text, speedup_text, where_text
from eval.pages.verdicts import reliable_speedup

SMALL = FONT_SIZE - 1
MAX_LABELS = 11
"""Maximum number of tick labels of an axis. With more ticks, some have no label."""
AXES = {"batch_size": "prompts decoded together", "context": "tokens of the prompt"}
MIN_POINTS = 4
"""Number of points below which a curve says less than a sentence."""
CYCLE = ("draft", "verify", "accept", "commit")
"""Colours of the series of a chart, in turn."""
SPEED_STEPS = [1, 2, 2.5, 5, 10]
"""Steps of an axis of speedups, with a tick at 1."""
Series = dict[tuple[str, float], list[tuple[int, Measurement]]]
"""Name and temperature of a series -> its points: batch size or context, and figures."""


def head_charts(results: Results, others: Sequence[Results] = ()) -> list[Chart]:
    """Return the charts of a measurement of one head, beside those of other places where it was measured, the newest
    first. A curve of few points is left to tables."""
    charts = []
    m = results.headline
    for along, name in (("batch_size", "batch size"), ("context", "context")):
        if series := speedups_along(along, results, others):
            note = f"Over plain decoding of the same prompts in the same run, with {m.tree}. Bars are 95% intervals."
            draw = partial(draw_speedups, series=series, label=AXES[along])
            height = 2.7 + 0.2 * len(series)
            charts.append(Chart(along.replace("_", "-"), f"Speedup by {name}", note, draw, height, folded=False))
    setting = setting_text(m)
    if m.speedup is not None and not math.isnan(reliable_speedup(m)) and m.speculative.breakdown_ms:
        note = (
            "One round by phase, above the time that plain decoding takes for as many tokens. The ratio of the two "
            f"bars is the speedup that the costs predict, {number(m.speedup.predicted)}x; measured: {speedup_text(m)}."
        )
        charts.append(Chart("round", "Where a round's time goes", note, partial(draw_round, m=m), 2.4))
    note = f"Share of rounds in which the k-th draft token was accepted, where those before it were ({setting})."
    draw = partial(draw_acceptance, alpha=reached(m.alpha))
    charts.append(Chart("acceptance", "Acceptance by depth", note, draw))
    if len(m.tau_by_position) > 1:
        note = "tau of the rounds by where in the text they begin, the prompt included, with 95% intervals"
        charts.append(Chart("position", "tau by position", f"{note} ({setting}).", partial(draw_positions, m=m)))
    return charts


def speedups_along(along: str, results: Results, others: Sequence[Results]) -> Series:
    """Return the reliable speedups by batch size or context, here and in servers. All else is as in the headline
    setting, but the draft of servers, which have their own. Nothing if there are too few."""
    other = "context" if along == "batch_size" else "batch_size"
    headline = point_of(results, results.headline)
    series: Series = {}
    seen = set()
    for part in (results, *others):
        for m in part.measurements:
            point, where = point_of(part, m), where_text(part)
            place, key = point[along], (where, m.tree, m.temperature, point[along])
            if place is None or key in seen or point[other] != headline[other] or math.isnan(reliable_speedup(m)):
                continue
            if part.server is None and m.tree != results.headline.tree:
                continue
            seen.add(key)
            series.setdefault((f"{where}: {m.tree}" if others else m.tree, m.temperature), []).append((place, m))
    places = [place for line in series.values() for place, _ in line]
    return series if len(places) >= MIN_POINTS - 1 and len(set(places)) > 1 else {}


def point_of(results: Results, m: Measurement) -> dict[str, int | None]:
    return {"batch_size": m.batch_size or results.settings.batch_size, "context": m.context}


def draw_speedups(axes: Axes, *, series: Series, label: str) -> None:
    """Draw speedups with their intervals. A colour is a draft, at temperatures above 0 with hollow dots."""
    axes.axhline(1, color=COLOURS["faded"], lw=1, zorder=0)
    names = list(dict.fromkeys(name for name, _ in series))
    for (name, temperature), line in series.items():
        colour = COLOURS[CYCLE[names.index(name) % len(CYCLE)]]
        points = sorted((place, reliable_speedup(m), m.speedup and m.speedup.ci95) for place, m in line)
        for place, speedup, interval in points:
            axes.plot([place, place], interval or (speedup, speedup), color=colour, lw=2.2)
        dot: dict[str, Any] = {"ms": 6, "mfc": COLOURS["card"] if temperature else colour, "mew": 1.8}
        text = f"{name}, {sampling_text(temperature)}"
        axes.plot(*zip(*(point[:2] for point in points), strict=True), "o-", color=colour, lw=1, label=text, **dot)
    places = sorted({place for line in series.values() for place, _ in line})
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(places, list(map(str, places)))
    axes.margins(x=0.08, y=0.12)
    axes.set_xlabel(label)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=SPEED_STEPS))
    draw_grid(axes)
    handles, labels = axes.get_legend_handles_labels()
    draw_legend(axes, handles, columns=1 if max(map(len, labels)) > 18 else 2)


def draw_acceptance(axes: Axes, *, alpha: Sequence[float | None]) -> None:
    """Draw bars with their figures above; of many bars, only some have a figure."""
    depths, values = range(1, len(alpha) + 1), [value or 0.0 for value in alpha]
    every = math.ceil(len(alpha) / MAX_LABELS)
    bars = axes.bar(depths, values, color=COLOURS["draft"], width=0.64)
    labels = [percent(value) if n % every == 0 else "" for n, value in enumerate(alpha)]
    axes.bar_label(bars, labels, padding=7, fontweight="bold", fontsize=SMALL)
    axes.set(xticks=depths[::every], yticks=[], xlim=(0.4, max(len(alpha), 4) + 0.6), ylim=(0, 1.15))
    axes.tick_params(length=0, pad=8)
    axes.spines["left"].set_visible(False)
    ring: dict[str, Any] = {"mfc": COLOURS["card"], "mec": COLOURS["verify"], "mew": 2.2, "ms": 8, "ls": ""}
    shares = [math.prod(values[:depth]) for depth in depths]
    rings = axes.plot(depths, shares, "o", label="share of all rounds that reached it", clip_on=False, **ring)
    axes.set_xlabel("depth of the draft")
    draw_legend(axes, [Patch(color=COLOURS["draft"], label="accepted, given the depths before"), *rings])


def draw_positions(axes: Axes, *, m: Measurement) -> None:
    bins = m.tau_by_position
    for n, part in enumerate(bins):
        axes.plot([n, n], part.ci95 or (part.mean, part.mean), color=COLOURS["accept"], lw=2.5)
        axes.plot(n, part.mean, "o", color=COLOURS["accept"], ms=7)
    every = math.ceil(len(bins) / MAX_LABELS)
    starts = [part.start for part in bins[::every]]
    axes.set_xticks(range(0, len(bins), every), [f"{n // 1024}k" if n >= 1024 else str(n) for n in starts])
    axes.set_xlim(-0.5, len(bins) - 0.5)
    axes.set_xlabel("first position of each bin, in tokens")
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=SPEED_STEPS))


def draw_round(axes: Axes, *, m: Measurement) -> None:
    tau, step, breakdown = m.tau.mean, m.speculative.plain_step_ms, m.speculative.breakdown_ms
    plain, whole = tau * step, sum(breakdown.values())
    left = 0.0
    for phase, milliseconds in breakdown.items():
        label = f"{phase} {number(milliseconds)} ms"
        axes.barh(0, milliseconds, left=left, color=COLOURS[phase], height=0.5, label=label)
        left += milliseconds
    axes.barh(1, plain, color=COLOURS["plain"], height=0.5)
    axes.vlines([k * step for k in range(1, math.ceil(tau))], 0.75, 1.25, color=COLOURS["card"], lw=1.5)
    names = (f"one round, {number(tau)} tokens", whole), (f"plain decoding, {number(tau)} tokens", plain)
    for n, (name, milliseconds) in enumerate(names):
        axes.text(0, n - 0.33, name, color=COLOURS["soft"], fontsize=SMALL)
        figure: dict[str, Any] = {"va": "center", "fontweight": "bold", "fontsize": SMALL}
        axes.annotate(f"{number(milliseconds)} ms", (milliseconds, n), (6, 0), textcoords="offset points", **figure)
    axes.set(xticks=[], yticks=[], xlim=(0, 1.28 * max(plain, whole)), ylim=(1.3, -0.6))
    axes.spines[["left", "bottom"]].set_visible(False)
    draw_legend(axes, axes.get_legend_handles_labels()[0], columns=2)


def draw_grid(axes: Axes) -> None:
    axes.grid(axis="y", color=COLOURS["line"], lw=0.6)
    axes.set_axisbelow(True)


def draw_legend(axes: Axes, handles: Sequence[Artist], *, columns: int = 1) -> None:
    """Draw the legend above the axes, so that it covers nothing."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
    axes.legend(handles=handles, handlelength=1, ncols=columns, fontsize=SMALL, **place)
