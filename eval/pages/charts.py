"""The charts of reports: of one head, of its training, and of a comparison of several heads."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from eval.measure.results import Results
from eval.pages.drawing import COLOURS, FONT_SIZE, Chart
from eval.pages.format import (
    number,
    percent,
    reached,
    sampling_text,
    setting_text,
    speedup_text,
    why_unreliable,
)

SMALL = FONT_SIZE - 1
MOST_LABELS = 11
"""Maximum number of tick labels of an axis. With more ticks, some have no label."""
LETTERS = 47
"""Maximum number of letters in a row's name and its figure together."""
ROW = 0.4
"""Height of a row with its label above, in inches."""
GAP = 0.26
"""Distance from a row up to its label, in rows."""
LINE = 0.16
"""Length of the line at 1 below a row, in rows. Above the row it is half as long."""
CLEAR = {"facecolor": COLOURS["card"], "edgecolor": "none", "pad": 1.0}
"""Background of a label that may overlap a line."""
SPREAD = 0.7
"""Maximum width, in units of depth, over which settings of equal depth are spread. They are at most STEP apart."""
STEP = 0.16
LARGEST = 1e15
"""Absolute value from which points are not drawn. Infinity is not drawn either."""
MOST_POINTS = 300
"""Maximum number of points of a curve. Longer records are averaged."""
FEWEST = 4
"""Number of points below which a curve says less than a sentence."""
HEAD_COLOURS = ("draft", "verify", "accept", "commit")
"""Colours of the heads in a comparison, in turn."""
POINTS = {"batch_size": "batch", "context": "context"}
KINDS = {"chain": "draft", "tree": "verify"}
"""Kind of draft -> name of its colour."""


def head_charts(results: Results, log: Sequence[Results] = ()) -> list[Chart]:
    """Return the charts of a results.json, and of the training `log` (metrics.jsonl) if there is one: speed first, then
    acceptance, then training. A curve of fewer than FEWEST points is left to `remarks`."""
    found: list[Chart] = []

    def add(name: str, title: str, note: str, draw: Callable[..., None], height: float = 2.7, **given: Any) -> None:
        found.append(Chart(name, title, note, partial(draw, **given), height))

    setting = setting_text(results)
    if len(known := reliable(results["measurements"])) >= FEWEST:
        found.append(row_chart("speedup", known))
    if why_unreliable(results) is None and "server" not in results:
        note = (
            "One round by phase, above the time that plain decoding takes for as many tokens. The ratio of the two "
            f"bars is the speedup that the costs predict, {number(results['speedup']['predicted'])}x; measured: "
            f"{speedup_text(results)}."
        )
        add("round", "Where a round's time goes", note, draw_round, 2.4, results=results)
    if len(measured := at_headline(results)) >= FEWEST:
        note = (
            f"{sampling_text(results['temperature']).capitalize()}: measured, with 95% intervals. 1x is plain decoding."
        )
        add("depth", "Speedup by depth", note, draw_depths, measured=measured)
        note = (
            "A round's time, shared among its tokens: the median (dot), and how far 95% (tick) and 99% (end of the "
            "line) reach. Dotted: the median of plain decoding."
        )
        add("latency", "Time between tokens", note, draw_latency, measured=measured)
    for along, by in (("batch_size", "context"), ("context", "batch_size")):
        if len(measured := along_points(results, along)) >= FEWEST:
            note = f"{results['tree']}: speculative decoding; dotted, plain decoding of the same prompts."
            title = f"Tokens/s by {along.replace('_', ' ')}"
            add(along.replace("_", "-"), title, note, draw_rates, measured=measured, along=along, by=by)
    note = f"Share of rounds in which the k-th draft token was accepted, where those before it were ({setting})."
    add("acceptance", "Acceptance by depth", note, draw_acceptance, alpha=reached(results["alpha"]))
    note = f"Share of rounds by the tokens they emitted, the target's own token included ({setting})."
    add("tokens", "Tokens per round", note, draw_tokens, results=results)
    if len(bins := results.get("tau_by_position", ())) >= FEWEST:
        note = "tau of the rounds by where in the text they begin, the prompt included, with 95% intervals"
        add("position", "tau by position", f"{note} ({setting}).", draw_positions, bins=bins)
    if len(losses := points(log, "train", "loss")) >= FEWEST:
        note = "Loss of the head over the training steps, all depths together."
        add("loss", "Training loss", note, draw_curve, points=losses, label="loss")
    if len(taus := points(log, "eval", "tau")) >= FEWEST:
        note = "tau measured by the runtime during training. The ring is the head that was kept."
        add("training-tau", "tau over training", note, draw_curve, points=taus, label="tau", dots=True)
    return found


def comparison_charts(shown: Sequence[Results]) -> list[Chart]:
    known = reliable(shown)
    return [*([row_chart("compare-speedup", known)] if known else []), row_chart("compare-tau", shown)]


def row_chart(name: str, measured: Sequence[Results]) -> Chart:
    note = "Over plain decoding on the same prompts in the same run, with 95% intervals. The line is 1x."
    if name == "compare-tau":
        note = "Tokens emitted per target pass, with 95% intervals; plain decoding has 1."
    figure, title, colour = ("tau", "tau", "accept") if name == "compare-tau" else ("speedup", "Speedup", "draft")
    draw = partial(draw_rows, measured=measured, figure=figure, colour=colour)
    return Chart(name, title, note, draw, 0.5 + ROW * len(measured))


def remarks(results: Results, log: Sequence[Results] = ()) -> list[str]:
    """Return a sentence for each curve that has too few points for a chart."""
    found = []
    bins = results.get("tau_by_position", ())
    if 1 < len(bins) < FEWEST:
        parts = [f"{number(part['mean'])} from token {part['from']} on" for part in bins]
        found.append(f"tau by position in the text ({setting_text(results)}): {', '.join(parts)}")
    for along, name in POINTS.items():
        if 1 < len(measured := along_points(results, along)) < FEWEST:
            rates = [
                [number(m[side]["tokens_per_second"], 1) for side in ("speculative", "baseline")] for m in measured
            ]
            parts = [f"{r[0]} at {name} {m[along]} (plain {r[1]})" for r, m in zip(rates, measured, strict=True)]
            found.append(f"tokens/s by {name} ({results['tree']}): {', '.join(parts)}")
    for kind, name in (("train", "loss"), ("eval", "tau")):
        if 1 < len(curve := points(log, kind, name)) < FEWEST:
            parts = [f"{number(value)} at step {step:,}" for step, value in curve]
            found.append(f"{name} over training: {', '.join(parts)}")
    return found


def points(log: Sequence[Results], kind: str, name: str) -> list[tuple[int, float]]:
    """Return (step, figure) of the records of one kind, without figures that are not numbers or too large to draw."""
    pairs = [(record.get("step"), record.get(name)) for record in log if record.get("kind") == kind]
    return [
        (step, value)
        for step, value in pairs
        if type(step) is int and isinstance(value, int | float) and max(abs(step), abs(value)) < LARGEST
    ]


def reliable(measured: Sequence[Results]) -> list[Results]:
    return [m for m in measured if why_unreliable(m) is None]


def at_headline(results: Results) -> list[Results]:
    names = ("temperature", "batch_size", "context")
    return [m for m in reliable(results["measurements"]) if all(m.get(name) == results.get(name) for name in names)]


def along_points(results: Results, along: str) -> list[Results]:
    """Return the reliable measurements of the headline's draft and temperature if they differ in the batch size or the
    context, `along`; else none."""
    own = [m for m in reliable(results["measurements"]) if m["tree"] == results["tree"] and along in m]
    own = [m for m in own if m["temperature"] == results["temperature"]]
    return own if len({m[along] for m in own}) > 1 else []


def draw_rows(axes: Axes, *, measured: Sequence[Results], figure: str, colour: str) -> None:
    """Draw `tau` or `speedup` of each setting as a dot on its interval, with its name and its figure above. In a
    comparison each head has a colour. The line at 1 is broken where names stand."""
    across = axes.get_yaxis_transform()
    heads = list(dict.fromkeys(m.get("head") for m in measured))
    for n, m in enumerate(measured):
        if len(heads) > 1:
            colour = HEAD_COLOURS[heads.index(m["head"]) % len(HEAD_COLOURS)]
        axes.plot([1, 1], [n - LINE / 2, n + LINE], color=COLOURS["faded"], lw=1, zorder=0)
        value = m["tau"]["mean"] if figure == "tau" else m["speedup"]["measured"]
        text = number(value) if figure == "tau" else f"{number(value)}x"
        low, high = shared(value, m[figure]["ci95"])
        axes.plot([low, high], [n, n], color=COLOURS[colour], lw=2.5)
        axes.plot(value, n, "o", color=COLOURS[colour], ms=7)
        look: dict[str, Any] = {"transform": across, "fontsize": SMALL, "bbox": CLEAR}
        axes.text(0, n - GAP, row_name(m, LETTERS - len(text)), color=COLOURS["soft"], **look)
        axes.text(1, n - GAP, text, ha="right", fontweight="bold", **look)
    axes.set_ylim(len(measured) - 0.6, -0.85)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))


def row_name(figures: Results, room: int) -> str:
    """Return the name of a row: the setting, with the head's name before it in a comparison. A head's name that is too
    long is shortened in the middle."""
    setting, name = setting_text(figures), figures.get("head", "")
    if len(name) > room - len(setting) - 2:
        half = max((room - len(setting) - 2) // 2, 3)
        name = f"{name[:half]}…{name[1 - half :]}"
    return f"{name}, {setting}" if name else setting


def shared(value: float, interval: Sequence[float | None] | None) -> tuple[float, float]:
    low, high = interval or (None, None)
    return (value, value) if low is None or high is None else (low, high)


def draw_acceptance(axes: Axes, *, alpha: Sequence[float | None]) -> None:
    """Draw alpha_k as bars, and the share of all rounds that reached each depth as rings."""
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
    """Draw tau of each bin of positions as a dot on its interval."""
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
    """Draw one round by phase, above the time that plain decoding takes for as many tokens."""
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


def dots(measured: Sequence[Results]) -> list[tuple[float, Results]]:
    """Return each setting with its depth. Settings of one depth are shifted so that they stand beside each other."""
    found = []
    for m in measured:
        level = [other["tree"] for other in measured if other["depth"] == m["depth"]]
        step = min(STEP, SPREAD / max(len(level) - 1, 1))
        found.append((m["depth"] + step * (level.index(m["tree"]) - (len(level) - 1) / 2), m))
    return found


def kind_of(m: Results) -> str:
    return "chain" if m["nodes"] == m["depth"] + 1 else "tree"


def draw_depths(axes: Axes, *, measured: Sequence[Results]) -> None:
    axes.axhline(1, color=COLOURS["faded"], lw=1, zorder=0)
    for at, m in dots(measured):
        speedup, colour = m["speedup"], COLOURS[KINDS[kind_of(m)]]
        axes.plot([at, at], shared(speedup["measured"], speedup["ci95"]), color=colour, lw=2.2)
        axes.plot(at, speedup["measured"], "o", color=colour, ms=6)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    mark_depths(axes, measured, 1)


def draw_latency(axes: Axes, *, measured: Sequence[Results]) -> None:
    """Draw the time between tokens against the depth of the draft; plain decoding is at 0."""
    plain = measured[0]["baseline"]["token_ms"]
    axes.axhline(plain["p50"], color=COLOURS["faded"], lw=1, ls=":", zorder=0)
    marks = [(0.0, "faded", plain)]
    marks += [(at, KINDS[kind_of(m)], m["speculative"]["token_ms"]) for at, m in dots(measured)]
    for at, colour, spread in marks:
        axes.plot([at, at], [spread["p50"], spread["p99"]], color=COLOURS[colour], lw=2.2)
        axes.plot(at, spread["p50"], "o", color=COLOURS[colour], ms=6)
        axes.plot(at, spread["p95"], "_", color=COLOURS[colour], ms=9, mew=2)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} ms")
    mark_depths(axes, measured, 0)


def mark_depths(axes: Axes, measured: Sequence[Results], first: int) -> None:
    """Draw the axis of depths from `first` on, with a margin at both ends, and the legend of colours."""
    last = max(m["depth"] for m in measured)
    ticks = range(first, last + 1, math.ceil((last - first + 1) / MOST_LABELS))
    axes.set_xticks(ticks, [str(depth) if depth else "plain" for depth in ticks])
    axes.set_xlim(first - 0.6, last + 0.6)
    axes.set_xlabel("depth of the draft")
    grid(axes)
    kinds = [kind for kind in KINDS if any(kind_of(m) == kind for m in measured)]
    put_legend(axes, [Patch(color=COLOURS[KINDS[kind]], label=f"{kind}s") for kind in kinds], columns=2)


def draw_rates(axes: Axes, *, measured: Sequence[Results], along: str, by: str) -> None:
    """Draw tokens/s of speculative and (dotted) of plain decoding against the batch size or the context, `along`, with
    a line for each value of the other, `by`."""
    values = list(dict.fromkeys(m.get(by) for m in measured))
    for n, value in enumerate(values):
        line = sorted((m for m in measured if m.get(by) == value), key=lambda m: m[along])
        places, colour = [m[along] for m in line], COLOURS[HEAD_COLOURS[n % len(HEAD_COLOURS)]]
        label = "speculative" if value is None else f"{POINTS[by]} {value}"
        axes.plot(places, [m["speculative"]["tokens_per_second"] for m in line], "o-", color=colour, ms=5, label=label)
        axes.plot(places, [m["baseline"]["tokens_per_second"] for m in line], "o:", color=colour, ms=3)
    places = sorted({m[along] for m in measured})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.margins(x=0.08, y=0.1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompts decoded together" if along == "batch_size" else "tokens of the prompt")
    axes.set_ylabel("tokens/s")
    grid(axes)
    put_legend(axes, axes.get_legend_handles_labels()[0], columns=3)


def grid(axes: Axes) -> None:
    axes.grid(axis="y", color=COLOURS["line"], lw=0.6)
    axes.set_axisbelow(True)


def put_legend(axes: Axes, handles: Sequence[Artist], *, columns: int = 1) -> None:
    """Draw the legend above the axes, so that it covers nothing."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
    axes.legend(handles=handles, handlelength=1, ncols=columns, fontsize=SMALL, **place)


def draw_curve(axes: Axes, *, points: Sequence[tuple[int, float]], label: str, dots: bool = False) -> None:
    """Draw a figure over the training steps. With `dots`, mark each measurement, and the best one with a ring."""
    size = math.ceil(len(points) / MOST_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    steps, values = ([fmean(point[axis] for point in group) for group in groups] for axis in (0, 1))
    colour = COLOURS["accept" if dots else "draft"]
    axes.plot(steps, values, "o-" if dots else "-", color=colour, lw=1.8, ms=5)
    if dots:
        step, best = max(points, key=lambda point: point[1])
        axes.plot(step, best, "o", mfc="none", mec=COLOURS["verify"], mew=2, ms=11)
        axes.annotate(f"{best:.2f}", (step, best), xytext=(0, 10), textcoords="offset points", ha="center")
    axes.margins(x=0.05, y=0.2 if dots else 0.08)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    grid(axes)
