"""The charts of reports: of one head, of its training, and of several heads side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from eval.benchmark.results import Results
from eval.reporting.drawing import COLOURS, FONT_SIZE, Chart
from eval.reporting.format import (
    is_disturbed,
    number,
    percent,
    reached,
    sampling_text,
    setting_text,
    speedup_text,
)

SMALL = FONT_SIZE - 1
MOST_LABELS = 11
"""Of an axis; beyond it, some places have none."""
LETTERS = 47
"""Of a row's name and its figure."""
ROW = 0.4
"""Of a row with its label above, in inches."""
GAP = 0.26
"""From a row up to its label, in rows."""
CLEAR = {"facecolor": COLOURS["card"], "edgecolor": "none", "pad": 1.0}
"""Behind a label that may stand on a line."""
SPREAD = 0.7
"""Within which settings of equal depth stand, in units of depth; STEP apart where there is room."""
STEP = 0.16
LARGEST = 1e15
"""Of what is drawn; infinity is above it."""
MOST_POINTS = 300
"""Of a curve; longer records are averaged."""
KINDS = {"chain": "draft", "tree": "verify"}
"""A draft's kind -> the colour it has."""


def head_charts(results: Results, log: Sequence[Results] = ()) -> list[Chart]:
    """The charts of a results.json, and of the training `log` (metrics.jsonl) where there is one."""
    setting = f"{results['tree']}, {sampling_text(results['temperature'])}"
    found = [
        Chart(
            "acceptance",
            "Acceptance by depth",
            f"Share of rounds in which the k-th draft token was accepted, where those before it were ({setting}).",
            partial(draw_acceptance, alpha=reached(results["alpha"])),
        ),
        Chart(
            "tokens",
            "Tokens per round",
            f"Share of rounds by the tokens they emitted, the target's own token included ({setting}).",
            partial(draw_tokens, results=results),
        ),
    ]
    if results["speedup"] is not None:
        found.append(
            Chart(
                "round",
                "Where a round's time goes",
                "One round by phase, above the time that plain decoding takes for as many tokens. The ratio of the two "
                f"bars is the speedup that the costs predict, {number(results['speedup']['predicted'])}x; measured: "
                f"{speedup_text(results)}.",
                partial(draw_round, results=results),
                height=2.4,
            )
        )
        found.append(speedups("speedup", results["measurements"]))
    if (curves := depth_curves(results)) is not None:
        model = "; the broken lines are what the costs promise" if any(curves.model.values()) else ""
        found += [
            Chart(
                "depth",
                "Speedup by depth",
                f"{sampling_text(results['temperature']).capitalize()}: measured, with 95% intervals{model}. 1x is "
                "plain decoding.",
                partial(draw_depths, curves=curves),
            ),
            Chart(
                "latency",
                "Time between tokens",
                "A round's time, shared among its tokens: the median (dot), and how far 95% (tick) and 99% (end of the "
                "line) reach. Dotted: the median of plain decoding.",
                partial(draw_latency, curves=curves),
            ),
        ]
    return [*found, *training_charts(log)]


def training_charts(log: Sequence[Results]) -> list[Chart]:
    """The loss and tau over the steps of a training."""
    losses, taus = points(log, "train", "loss"), points(log, "eval", "tau")
    found = []
    if len(losses) > 1:
        note = "Loss of the head over the training steps, all depths together."
        found.append(Chart("loss", "Training loss", note, partial(draw_curve, points=losses, label="loss")))
    if len(taus) > 1:
        note = "tau measured by the runtime during training. The ring is the head that was kept."
        draw = partial(draw_curve, points=taus, label="tau", dots=True)
        found.append(Chart("training-tau", "tau over training", note, draw))
    return found


def points(log: Sequence[Results], kind: str, name: str) -> list[tuple[int, float]]:
    """A figure of the records of one kind by the step; what is no number is left out."""
    pairs = [(record.get("step"), record.get(name)) for record in log if record.get("kind") == kind]
    return [
        (step, value)
        for step, value in pairs
        if type(step) is int and isinstance(value, int | float) and max(abs(step), abs(value)) < LARGEST
    ]


def comparison_charts(shown: Sequence[Results]) -> list[Chart]:
    """Speedup and tau of the measurements that a comparison's table shows."""
    tau = [row(m, m["tau"]["mean"], m["tau"]["ci95"], number(m["tau"]["mean"])) for m in shown]
    note = "Tokens emitted per target pass, with 95% intervals; plain decoding has 1."
    found = [Chart("compare-tau", "tau", note, partial(draw_rows, rows=tau, colour="accept"), rows_height(tau))]
    return [speedups("compare-speedup", shown), *found] if all(m["speedup"] for m in shown) else found


@dataclass(frozen=True)
class Row:
    """A setting of a head, and a figure with its interval."""

    head: str
    """Empty where all rows are of one head."""
    setting: str
    value: float
    interval: Sequence[float | None] | None
    text: str

    def label(self, room: int) -> str:
        """The name of the row; that of the head as far as there is room."""
        left = room - len(self.setting) - 2
        name = self.head
        if len(name) > left:
            half = max(left // 2, 3)
            name = f"{name[:half]}…{name[1 - half :]}"
        return f"{name}, {self.setting}" if name else self.setting


def row(figures: Results, value: float, interval: Sequence[float | None] | None, text: str) -> Row:
    """The row of a measurement."""
    return Row(figures.get("head", ""), setting_text(figures), value, interval, text)


def speedups(name: str, measured: Sequence[Results]) -> Chart:
    """The speedup of each setting."""
    rows = []
    for m in measured:
        speed = m["speedup"]
        text = speedup_text(m) if is_disturbed(m) else f"{number(speed['measured'])}x"
        rows.append(row(m, speed["measured"], speed["ci95"], text))
    note = "Over plain decoding on the same prompts in the same run, with 95% intervals. The line is 1x."
    return Chart(name, "Speedup", note, partial(draw_rows, rows=rows), rows_height(rows))


def rows_height(rows: Sequence[Row]) -> float:
    """Inches for so many rows and their axis."""
    return 0.5 + ROW * len(rows)


def draw_rows(axes: Axes, *, rows: Sequence[Row], colour: str = "draft") -> None:
    """Each value as a dot on its interval, its name and its figure above it."""
    axes.axvline(1, color=COLOURS["faded"], lw=1, zorder=0)
    across = axes.get_yaxis_transform()
    for n, row in enumerate(rows):
        low, high = shared(row.value, row.interval)
        axes.plot([low, high], [n, n], color=COLOURS[colour], lw=2.5)
        axes.plot(row.value, n, "o", color=COLOURS[colour], ms=7)
        look: dict[str, Any] = {"transform": across, "fontsize": SMALL, "bbox": CLEAR}
        axes.text(0, n - GAP, row.label(LETTERS - len(row.text)), color=COLOURS["soft"], **look)
        axes.text(1, n - GAP, row.text, ha="right", fontweight="bold", **look)
    axes.set_ylim(len(rows) - 0.6, -0.85)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))


def shared(value: float, interval: Sequence[float | None] | None) -> tuple[float, float]:
    """The ends of an interval; the value itself where there is none."""
    low, high = interval or (None, None)
    return (value, value) if low is None or high is None else (low, high)


def draw_acceptance(axes: Axes, *, alpha: Sequence[float | None]) -> None:
    """alpha_k as bars; as rings the share of all rounds that came so far."""
    draw_bars(axes, range(1, len(alpha) + 1), [value or 0.0 for value in alpha], list(map(percent, alpha)), "draft")
    reach = [math.prod(value or 0.0 for value in alpha[:depth]) for depth in range(1, len(alpha) + 1)]
    ring: dict[str, Any] = {"mfc": COLOURS["card"], "mec": COLOURS["verify"], "mew": 2.2, "ms": 8, "ls": ""}
    rings = axes.plot(
        range(1, len(alpha) + 1), reach, "o", label="share of all rounds that came so far", clip_on=False, **ring
    )
    axes.set_ylim(0, 1.15)
    axes.set_xlabel("depth of the draft")
    bars = Patch(color=COLOURS["draft"], label="accepted, given the depths before")
    put_legend(axes, [bars, *rings])


def draw_tokens(axes: Axes, *, results: Results) -> None:
    """The share of rounds by the tokens they emitted."""
    counts = results["accepted_histogram"][: len(reached(results["alpha"])) + 1]
    shares = [n / max(sum(counts), 1) for n in counts]
    draw_bars(axes, range(1, len(counts) + 1), shares, list(map(percent, shares)), "accept")
    axes.set_ylim(0, 1.15 * (max(shares) or 1))
    axes.set_xlabel(f"tokens a round emitted, {number(results['tau']['mean'])} on average")


def draw_bars(axes: Axes, places: range, values: Sequence[float], labels: Sequence[str], colour: str) -> None:
    """Bars with their figures above, some of them where there are many."""
    every = math.ceil(len(places) / MOST_LABELS)
    bars = axes.bar(places, values, color=COLOURS[colour], width=0.64)
    shown = [label if n % every == 0 else "" for n, label in enumerate(labels)]
    axes.bar_label(bars, shown, padding=7, fontweight="bold", fontsize=SMALL)
    axes.set(xticks=places[::every], yticks=[], xlim=(0.4, max(len(places), 4) + 0.6))
    axes.tick_params(length=0, pad=8)
    axes.spines["left"].set_visible(False)


def draw_round(axes: Axes, *, results: Results) -> None:
    """One round by phase above the time that plain decoding takes for as many tokens."""
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
        axes.annotate(
            f"{number(milliseconds)} ms",
            (milliseconds, n),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
            fontsize=SMALL,
        )
    axes.set(xticks=[], yticks=[], xlim=(0, 1.28 * max(plain, whole)), ylim=(1.3, -0.6))
    axes.spines[["left", "bottom"]].set_visible(False)
    put_legend(axes, axes.get_legend_handles_labels()[0], columns=2)


@dataclass(frozen=True)
class Dot:
    """One setting measured."""

    tree: str
    at: float
    """Its depth, moved a little where others have the same."""
    chain: bool
    speedup: float
    low: float
    high: float
    token_ms: dict[str, float]
    """The time between tokens: p50, p95, p99."""

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return "chain" if self.chain else "tree"


@dataclass(frozen=True)
class Curves:
    """All settings of the headline's temperature, and what the cost model says where it was asked."""

    dots: list[Dot]
    model: dict[str, list[tuple[int, float]]]
    """`chain` and `tree` -> (depth, speedup by the cost model), the best tree of each depth."""
    plain_ms: dict[str, float]

    @property
    def deepest(self) -> int:
        """The greatest depth measured."""
        return max(round(dot.at) for dot in self.dots)

    @property
    def deepest_known(self) -> int:
        """The greatest depth measured or modelled."""
        return max([self.deepest, *(depth for line in self.model.values() for depth, _ in line)])


def depth_curves(results: Results) -> Curves | None:
    """The curves of a results.json; None where too little was measured, or the audit failed."""
    measured = [m for m in results["measurements"] if m["temperature"] == results["temperature"]]
    if len(measured) < 2 or not all(m["speedup"] for m in measured):
        return None
    searches = [search for search in results.get("auto", ()) if search["temperature"] == results["temperature"]]
    model: dict[str, dict[int, float]] = {"chain": {}, "tree": {}}
    for point in searches[0]["curve"] if searches else ():
        line = model["chain" if point["width"] == 1 else "tree"]
        line[point["depth"]] = max(point["speedup"], line.get(point["depth"], 0.0))
    dots = []
    for m in measured:
        level = [other["tree"] for other in measured if other["depth"] == m["depth"]]
        step = min(STEP, SPREAD / max(len(level) - 1, 1))
        at = m["depth"] + step * (level.index(m["tree"]) - (len(level) - 1) / 2)
        speed = m["speedup"]["measured"]
        chain = m["nodes"] == m["depth"] + 1
        dots.append(
            Dot(m["tree"], at, chain, speed, *shared(speed, m["speedup"]["ci95"]), m["speculative"]["token_ms"])
        )
    lines = {name: sorted(line.items()) for name, line in model.items()}
    return Curves(dots, lines, measured[0]["baseline"]["token_ms"])


def draw_depths(axes: Axes, *, curves: Curves) -> None:
    """Speedup against the depth of the draft: measured with intervals, and by the cost model."""
    axes.axhline(1, color=COLOURS["faded"], lw=1, zorder=0)
    for kind, line in curves.model.items():
        depths, speeds = [depth for depth, _ in line], [speed for _, speed in line]
        axes.plot(depths, speeds, "--", color=COLOURS[KINDS[kind]], alpha=0.7, lw=1.3)
    for dot in curves.dots:
        axes.plot([dot.at, dot.at], [dot.low, dot.high], color=COLOURS[KINDS[dot.kind]], lw=2.2)
        axes.plot(dot.at, dot.speedup, "o", color=COLOURS[KINDS[dot.kind]], ms=6)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    mark_depths(axes, curves, 1, curves.deepest_known)


def draw_latency(axes: Axes, *, curves: Curves) -> None:
    """The time between tokens against the depth of the draft; that of plain decoding at 0."""
    axes.axhline(curves.plain_ms["p50"], color=COLOURS["faded"], lw=1, ls=":", zorder=0)
    marks = [(0.0, "faded", curves.plain_ms)]
    marks += [(dot.at, KINDS[dot.kind], dot.token_ms) for dot in curves.dots]
    for at, colour, spread in marks:
        axes.plot([at, at], [spread["p50"], spread["p99"]], color=COLOURS[colour], lw=2.2)
        axes.plot(at, spread["p50"], "o", color=COLOURS[colour], ms=6)
        axes.plot(at, spread["p95"], "_", color=COLOURS[colour], ms=9, mew=2)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} ms")
    mark_depths(axes, curves, 0, curves.deepest)


def mark_depths(axes: Axes, curves: Curves, first: int, last: int) -> None:
    """The axis of depths, with room for what stands beside the first and the last, and what the colours mean."""
    every = math.ceil((last - first + 1) / MOST_LABELS)
    places = list(range(first, last + 1, every))
    axes.set_xticks(places, [str(place) if place else "plain" for place in places])
    axes.set_xlim(first - 0.6, last + 0.6)
    axes.set_xlabel("depth of the draft")
    axes.grid(axis="y", color=COLOURS["line"], lw=0.6)
    axes.set_axisbelow(True)
    kinds = [kind for kind in KINDS if any(dot.kind == kind for dot in curves.dots)]
    handles = [Patch(color=COLOURS[KINDS[kind]], label=f"{kind}s") for kind in kinds]
    put_legend(axes, handles, columns=2)


def put_legend(axes: Axes, handles: Sequence[Artist], *, columns: int = 1) -> None:
    """The legend, above the axes, where it hides nothing."""
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        borderpad=0,
        handlelength=1,
        ncols=columns,
        fontsize=SMALL,
    )


def draw_curve(axes: Axes, *, points: Sequence[tuple[int, float]], label: str, dots: bool = False) -> None:
    """A figure over the steps of a training; with `dots` each measurement, the best of them ringed."""
    steps, values = zip(*thinned(points), strict=True)
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
    axes.grid(axis="y", color=COLOURS["line"], lw=0.6)
    axes.set_axisbelow(True)


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """A curve of at most MOST_POINTS: the means of as many neighbours as it takes."""
    size = math.ceil(len(points) / MOST_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(fmean(step for step, _ in group), fmean(value for _, value in group)) for group in groups]
