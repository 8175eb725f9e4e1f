"""The charts of a setting of one head."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from eval.pages.drawing import COLOURS, FONT_SIZE, Chart
from eval.pages.texts import number, percent, reached, setting_text, speedup_text
from eval.pages.verdicts import reliable_speedup
from eval.records.figures_schema import Measurement

SMALL = FONT_SIZE - 1
MAX_LABELS = 11
"""Maximum number of tick labels of an axis. With more ticks, some have no label."""
CYCLE = ("draft", "verify", "accept", "commit")
"""Colours of the series of a chart, in turn."""


def head_charts(m: Measurement) -> list[Chart]:
    """Return the charts of a setting: where a round's time goes, acceptance by depth, and tau by position."""
    charts = []
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


def draw_acceptance(axes: Axes, *, alpha: Sequence[float | None]) -> None:
    """Draw bars with their figures above; of many bars, only some have a figure."""
    depths = range(1, len(alpha) + 1)
    values = [value or 0.0 for value in alpha]
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
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def draw_round(axes: Axes, *, m: Measurement) -> None:
    tau = m.tau.mean
    step = m.speculative.plain_step_ms
    breakdown = m.speculative.breakdown_ms
    plain = tau * step
    whole = sum(breakdown.values())
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


def draw_legend(axes: Axes, handles: Sequence[Artist], *, columns: int = 1) -> None:
    """Draw the legend above the axes, so that it covers nothing."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
    axes.legend(handles=handles, handlelength=1, ncols=columns, fontsize=SMALL, **place)
