"""The charts of reports: of one head, and of a comparison of several heads."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from eval.measure.curve import held_out_lines
from eval.measure.results import Results
from eval.pages.drawing import COLOURS, FONT_SIZE, Chart
from eval.pages.format import (
    number,
    percent,
    point_of,
    reached,
    sampling_text,
    setting_text,
    speedup_text,
    where_text,
    why_unreliable,
)

SMALL = FONT_SIZE - 1
MOST_LABELS = 11
"""Maximum number of tick labels of an axis. With more ticks, some have no label."""
LETTERS = 47
"""Maximum number of letters in a row's name and its figure together."""
ROW = 0.4
"""Height of a row with its label above, in inches."""
TALL_ROW = 0.54
ASIDE = 0.32
"""Height over which the dots of a tall row are spread, in rows."""
GAP = 0.26
"""Distance from a row up to its label, in rows."""
LINE = 0.16
"""Length of the line at 1 below a row, in rows. Above the row it is half as long."""
CLEAR = {"facecolor": COLOURS["card"], "edgecolor": "none", "pad": 1.0}
"""Background of a label that may overlap a line."""
SPREAD = 0.7
"""Maximum width, in units of depth, over which settings of equal depth are spread. They are at most STEP apart."""
STEP = 0.12
FEWEST = 4
"""Number of points below which a curve says less than a sentence."""
CYCLE = ("draft", "verify", "accept", "commit")
"""Colours of the series of a chart, in turn."""
Dot = tuple[str, float, Sequence[float | None] | None]
"""Name of a series, a figure and its interval."""


def head_charts(results: Results, others: Sequence[Results] = ()) -> list[Chart]:
    """Return the charts of a results.json, beside those of other places where the head was measured, the newest first.
    A curve of few points is left to tables and `remarks`."""
    found: list[Chart] = []

    def add(name: str, title: str, note: str, draw: Callable[..., None], height: float = 2.7, **given: Any) -> None:
        found.append(Chart(name, title, note, partial(draw, **given), height))

    for along, name in (("depth", "K, the depth of the draft"), ("batch_size", "batch size"), ("context", "context")):
        if (series := speedups_along(along, results, others)) is not None:
            drafts = "" if along == "depth" else f", with {results['tree']}"
            note = f"Over plain decoding of the same prompts in the same run{drafts}. Bars are 95% intervals."
            draw, height = partial(draw_speedups, series=series, along=along), 2.7 + 0.2 * len(series)
            found.append(Chart(along.replace("_", "-"), f"Speedup by {name}", note, draw, height, folded=False))
    setting = setting_text(results)
    if why_unreliable(results) is None and "server" not in results:
        note = (
            "One round by phase, above the time that plain decoding takes for as many tokens. The ratio of the two "
            f"bars is the speedup that the costs predict, {number(results['speedup']['predicted'])}x; measured: "
            f"{speedup_text(results)}."
        )
        add("round", "Where a round's time goes", note, draw_round, 2.4, results=results)
    note = f"Share of rounds in which the k-th draft token was accepted, where those before it were ({setting})."
    add("acceptance", "Acceptance by depth", note, draw_acceptance, alpha=reached(results["alpha"]))
    note = f"Share of rounds by the tokens they emitted, the target's own token included ({setting})."
    add("tokens", "Tokens per round", note, draw_tokens, results=results)
    if len(bins := results.get("tau_by_position", ())) >= FEWEST:
        note = "tau of the rounds by where in the text they begin, the prompt included, with 95% intervals"
        add("position", "tau by position", f"{note} ({setting}).", draw_positions, bins=bins)
    return found


def row_charts(tau: Sequence[tuple[str, list[Dot]]], speedup: Sequence[tuple[str, list[Dot]]]) -> list[Chart]:
    """Return the charts of several heads or settings: of each figure, rows by name, with a dot for each suite."""
    suites = {suite for _, dots in tau for suite, _, _ in dots}
    notes = {
        "tau": "Tokens emitted per target pass, with 95% intervals; plain decoding has 1.",
        "speedup": "Over plain decoding on the same prompts in the same run, with 95% intervals. The line is 1x.",
    }
    return [
        Chart(
            f"compare-{name}",
            "Speedup" if name == "speedup" else "tau",
            notes[name],
            partial(draw_rows, rows=rows, unit="x" * (name == "speedup")),
            0.8 + (ROW if len(suites) == 1 else TALL_ROW) * len(rows),
            folded=False,
        )
        for name, rows in (("speedup", speedup), ("tau", tau))
        if rows
    ]


def remarks(results: Results) -> list[str]:
    """Return a sentence in the place of a chart of few points, and what came of the checks of the learning curve."""
    found = list(held_out_lines(results["head"].get("curve", ())))
    bins = results.get("tau_by_position", ())
    if 1 < len(bins) < FEWEST:
        parts = [f"{number(part['mean'])} from token {part['from']} on" for part in bins]
        found.append(f"tau by position in the text ({setting_text(results)}): {', '.join(parts)}")
    return found


def speedups_along(
    along: str, results: Results, others: Sequence[Results]
) -> dict[tuple[str, float], list[tuple[int, Results]]] | None:
    """Return the reliable speedups by depth, batch size or context, here and in servers: series by their name and
    temperature, each of places and figures. All else is as in the headline setting, but the depth of servers, which
    have their own. None if there are too few."""
    fixed = [name for name in ("batch_size", "context") if name != along]
    series: dict[tuple[str, float], list[tuple[int, Results]]] = {}
    seen = set()
    for part in (results, *others):
        for m in part["measurements"]:
            place, where = point_of(part, m, along), where_text(part)
            draft = ("chain" if m["nodes"] == m["depth"] + 1 else "tree") if along == "depth" else m["tree"]
            same = all(point_of(part, m, name) == point_of(results, results, name) for name in fixed)
            same &= along == "depth" or draft == results["tree"] or "server" in part
            key = (where, m["tree"], m["temperature"], place)
            if place is None or not same or key in seen or why_unreliable(m) is not None:
                continue
            seen.add(key)
            name = f"{where}: {draft}" if others else draft
            series.setdefault((name, m["temperature"]), []).append((place, m))
    places = [place for own in series.values() for place, _ in own]
    return series if len(places) >= FEWEST - 1 and len(set(places)) > 1 else None


def draw_speedups(axes: Axes, *, series: dict[tuple[str, float], list[tuple[int, Results]]], along: str) -> None:
    """Draw speedups with their intervals. A colour is a series, at temperatures above 0 with hollow dots."""
    axes.axhline(1, color=COLOURS["faded"], lw=1, zorder=0)
    names = list(dict.fromkeys(name for name, _ in series))
    counts, drawn = Counter(place for own in series.values() for place, _ in own), Counter[int]()
    places = sorted(counts)
    for (name, temperature), own in series.items():
        colour, curve = COLOURS[CYCLE[names.index(name) % len(CYCLE)]], []
        for place, m in sorted(own, key=lambda pair: pair[0]):
            at: float = place
            if along == "depth":
                step = min(STEP, SPREAD / max(counts[place] - 1, 1))
                at += step * (drawn[place] - (counts[place] - 1) / 2)
                drawn[place] += 1
            axes.plot([at, at], shared(m["speedup"]["measured"], m["speedup"]["ci95"]), color=colour, lw=2.2)
            curve.append((at, m["speedup"]["measured"]))
        line = "-" if len({place for place, _ in own}) == len(own) else ""
        dot: dict[str, Any] = {"ms": 6, "mfc": COLOURS["card"] if temperature else colour, "mew": 1.8}
        label = f"{name}, {sampling_text(temperature)}"
        axes.plot(*zip(*curve, strict=True), f"o{line}", color=colour, lw=1, label=label, **dot)
    if along == "depth":
        axes.set_xlim(places[0] - 0.6, places[-1] + 0.6)
        places = list(range(places[0], places[-1] + 1, math.ceil((places[-1] - places[0] + 1) / MOST_LABELS)))
    else:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.margins(x=0.08)
    axes.set_xticks(places, list(map(str, places)))
    axes.margins(y=0.12)
    axes.set_xlabel({"depth": "K", "batch_size": "prompts decoded together"}.get(along, "tokens of the prompt"))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))  # these have a tick at 1
    grid(axes)
    handles, labels = axes.get_legend_handles_labels()
    put_legend(axes, handles, columns=1 if max(map(len, labels)) > 18 else 2)


def draw_rows(axes: Axes, *, rows: Sequence[tuple[str, list[Dot]]], unit: str) -> None:
    """Draw each row's dots on their intervals, a colour for each series, below the name of the row and, if there is one
    series, its figure. The line at 1 is broken where names stand."""
    across = axes.get_yaxis_transform()
    series = list(dict.fromkeys(name for _, dots in rows for name, _, _ in dots))
    for n, (name, dots) in enumerate(rows):
        axes.plot([1, 1], [n - LINE / 2, n + LINE], color=COLOURS["faded"], lw=1, zorder=0)
        for of, value, interval in dots:
            k = series.index(of)
            colour, at = COLOURS[CYCLE[k % len(CYCLE)]], n + ASIDE * k / max(len(series) - 1, 1)
            axes.plot(shared(value, interval), [at, at], color=colour, lw=2)
            axes.plot(value, at, "o", color=colour, ms=6)
        text = f"{number(dots[0][1])}{unit}" if len(series) == 1 else ""
        look: dict[str, Any] = {"transform": across, "fontsize": SMALL, "bbox": CLEAR}
        axes.text(0, n - GAP, shortened(name, LETTERS - len(text)), color=COLOURS["soft"], **look)
        axes.text(1, n - GAP, text, ha="right", fontweight="bold", **look)
    axes.set_ylim(len(rows) - (0.6 if len(series) == 1 else 0.45), -0.85)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{unit}")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if len(series) > 1:
        marks = [Patch(color=COLOURS[CYCLE[k % len(CYCLE)]], label=shortened(of, 18)) for k, of in enumerate(series)]
        put_legend(axes, marks, columns=2)


def shortened(name: str, room: int) -> str:
    """Return a name, shortened after its first third if it is longer than `room`: its end names the setting."""
    head = max(room // 3, 3)
    return name if len(name) <= room else f"{name[:head]}…{name[head + 1 - room :]}"


def shared(value: float, interval: Sequence[float | None] | None) -> tuple[float, float]:
    low, high = interval or (None, None)
    return (value, value) if low is None or high is None else (low, high)


def draw_acceptance(axes: Axes, *, alpha: Sequence[float | None]) -> None:
    draw_bars(axes, range(1, len(alpha) + 1), [value or 0.0 for value in alpha], list(map(percent, alpha)), "draft")
    reach = [math.prod(value or 0.0 for value in alpha[:depth]) for depth in range(1, len(alpha) + 1)]
    ring: dict[str, Any] = {"mfc": COLOURS["card"], "mec": COLOURS["verify"], "mew": 2.2, "ms": 8, "ls": ""}
    depths, label = range(1, len(alpha) + 1), "share of all rounds that reached it"
    rings = axes.plot(depths, reach, "o", label=label, clip_on=False, **ring)
    axes.set_ylim(0, 1.15)
    axes.set_xlabel("depth of the draft")
    bars = Patch(color=COLOURS["draft"], label="accepted, given the depths before")
    put_legend(axes, [bars, *rings])


def draw_positions(axes: Axes, *, bins: Sequence[Results]) -> None:
    for n, part in enumerate(bins):
        axes.plot([n, n], shared(part["mean"], part["ci95"]), color=COLOURS["accept"], lw=2.5)
        axes.plot(n, part["mean"], "o", color=COLOURS["accept"], ms=7)
    every = math.ceil(len(bins) / MOST_LABELS)
    starts = [part["from"] for part in bins[::every]]
    axes.set_xticks(range(0, len(bins), every), [f"{n // 1024}k" if n >= 1024 else str(n) for n in starts])
    axes.set_xlim(-0.5, len(bins) - 0.5)
    axes.set_xlabel("first position of each bin, in tokens")
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def draw_tokens(axes: Axes, *, results: Results) -> None:
    counts = results["accepted_histogram"][: len(reached(results["alpha"])) + 1]
    shares = [n / max(sum(counts), 1) for n in counts]
    draw_bars(axes, range(1, len(counts) + 1), shares, list(map(percent, shares)), "accept")
    axes.set_ylim(0, 1.15 * (max(shares) or 1))
    axes.set_xlabel(f"tokens a round emitted, {number(results['tau']['mean'])} on average")


def draw_bars(axes: Axes, ticks: range, values: Sequence[float], labels: Sequence[str], colour: str) -> None:
    """Draw bars with their figures above. If there are many bars, only some have a figure."""
    every = math.ceil(len(ticks) / MOST_LABELS)
    bars = axes.bar(ticks, values, color=COLOURS[colour], width=0.64)
    shown = [label if n % every == 0 else "" for n, label in enumerate(labels)]
    axes.bar_label(bars, shown, padding=7, fontweight="bold", fontsize=SMALL)
    axes.set(xticks=ticks[::every], yticks=[], xlim=(0.4, max(len(ticks), 4) + 0.6))
    axes.tick_params(length=0, pad=8)
    axes.spines["left"].set_visible(False)


def draw_round(axes: Axes, *, results: Results) -> None:
    tau, step = results["tau"]["mean"], results["speculative"]["plain_step_ms"]
    breakdown = results["speculative"]["breakdown_ms"]
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
    put_legend(axes, axes.get_legend_handles_labels()[0], columns=2)


def grid(axes: Axes) -> None:
    axes.grid(axis="y", color=COLOURS["line"], lw=0.6)
    axes.set_axisbelow(True)


def put_legend(axes: Axes, handles: Sequence[Artist], *, columns: int = 1) -> None:
    """Draw the legend above the axes, so that it covers nothing."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
    axes.legend(handles=handles, handlelength=1, ncols=columns, fontsize=SMALL, **place)
