"""The report's figures as PNG files, for a model card or a slide."""

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.curves import Curves, Dot, depth_curves, kinds
from eval.files import write_bytes
from eval.wording import Results, reached, sampling_text

BLUE, ORANGE, GREEN, GREY, LIGHT = "#0a6ebd", "#c4570c", "#2e7d5b", "#6b7280", "#d5d9e0"
PHASE_COLOURS = {"draft": BLUE, "verify": ORANGE, "accept": GREEN, "commit": GREY}
KIND_COLOURS = {"chain": BLUE, "tree": ORANGE, "plain": GREY}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa1ad",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "figure.dpi": 160,
}


def write_plots(results: Results, folder: Path) -> list[Path]:
    """acceptance.png, and where the audit allows a speed round.png and, of several settings, depth.png; -> the files
    written."""
    files = []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_acceptance(left, results)
        draw_histogram(right, results)
        files.append(save(figure, folder / "acceptance.png"))
        if results["speedup"] is not None:
            figure = Figure(figsize=(9.2, 2.3), layout="constrained")
            draw_round(figure.subplots(), results)
            files.append(save(figure, folder / "round.png"))
        if (curves := depth_curves(results)) is not None:
            figure = Figure(figsize=(9.2, 3.4), layout="constrained")
            left, right = figure.subplots(1, 2)
            draw_speedup(left, curves)
            draw_latency(right, curves)
            files.append(save(figure, folder / "depth.png"))
    return files


def draw_acceptance(axes: Axes, results: Results) -> None:
    """alpha_k as bars."""
    alpha = reached(results["alpha"])
    depths = range(1, len(alpha) + 1)
    bars = axes.bar(depths, [value or 0.0 for value in alpha], color=BLUE, width=0.66)
    known = ["" if value is None else f"{100 * value:.0f}%" for value in alpha]
    axes.bar_label(bars, known, padding=2, color="#374151")
    axes.set(xticks=list(depths), ylim=(0, 1.08), yticks=[0, 0.5, 1], yticklabels=["0", "50%", "100%"])
    axes.set_xlabel("depth of the draft")
    axes.set_title("Accepted, where the depths before were")


def draw_histogram(axes: Axes, results: Results) -> None:
    """The share of rounds by the tokens they emitted."""
    counts = results["accepted_histogram"][: len(reached(results["alpha"])) + 1]
    total = max(sum(counts), 1)
    tokens = range(1, len(counts) + 1)
    bars = axes.bar(tokens, [n / total for n in counts], color=ORANGE, width=0.66)
    axes.bar_label(bars, [f"{100 * n / total:.0f}%" for n in counts], padding=2, color="#374151")
    axes.set(xticks=list(tokens), ylim=(0, 1.15 * max(counts) / total if max(counts) else 1), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("tokens a round emitted, the bonus token included")
    axes.set_title(f"Rounds by tokens emitted: {results['tau']['mean']:.2f} on average")


def draw_round(axes: Axes, results: Results) -> None:
    """One round by phase above the time that plain decoding takes for as many tokens."""
    tau, step = results["tau"]["mean"], results["speculative"]["plain_step_ms"]
    breakdown = results["speculative"]["breakdown_ms"]
    axes.barh(0, tau * step, color=LIGHT, height=0.62)
    axes.text(tau * step, 0, f"  {tau * step:.1f} ms", va="center", color="#374151")
    left = 0.0
    for phase, milliseconds in breakdown.items():
        axes.barh(1, milliseconds, left=left, color=PHASE_COLOURS[phase], height=0.62, label=phase)
        left += milliseconds
    axes.text(left, 1, f"  {left:.1f} ms", va="center", color="#374151")
    axes.set(
        yticks=[0, 1], yticklabels=[f"plain decoding, {tau:.2f} tokens", f"one round, {tau:.2f} tokens"], xticks=[]
    )
    axes.set_xlim(0, 1.12 * max(tau * step, left))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.02), ncols=4, frameon=False)
    setting = f"{results['tree']}, {sampling_text(results['temperature'])}"
    axes.set_title(f"Where a round's time goes ({setting}): {results['speedup']['measured']:.2f}x measured")


def draw_speedup(axes: Axes, curves: Curves) -> None:
    """Speedup against the depth of the draft: measured with intervals, and by the cost model."""
    axes.axhline(1, color=LIGHT, zorder=0)
    for kind, line in curves.model.items():
        axes.plot([depth for depth, _ in line], [v for _, v in line], "--", color=KIND_COLOURS[kind], alpha=0.7, lw=1.2)
    for kind, dots in by_kind(curves):
        reach = [[dot.speedup - dot.low for dot in dots], [dot.high - dot.speedup for dot in dots]]
        at, speeds = [dot.at for dot in dots], [dot.speedup for dot in dots]
        axes.errorbar(at, speeds, yerr=reach, fmt="o", color=KIND_COLOURS[kind], ms=5, lw=1.8, label=f"{kind}s")
    axes.set(xticks=range(1, curves.deepest_known + 1))
    axes.set_xlabel("depth of the draft")
    axes.set_title("Speedup: measured, and by the costs (broken)" if any(curves.model.values()) else "Speedup")
    axes.legend(frameon=False)


def draw_latency(axes: Axes, curves: Curves) -> None:
    """The time between tokens against the depth of the draft; plain decoding's at 0."""
    spreads = [("plain", [0.0], [curves.plain_ms])]
    spreads += [(kind, [dot.at for dot in dots], [dot.token_ms for dot in dots]) for kind, dots in by_kind(curves)]
    for kind, at, values in spreads:
        low, mid, high = ([spread[share] for spread in values] for share in ("p50", "p95", "p99"))
        axes.vlines(at, low, high, color=KIND_COLOURS[kind], lw=1.8)
        axes.plot(at, low, "o", color=KIND_COLOURS[kind], ms=5)
        axes.plot(at, mid, "_", color=KIND_COLOURS[kind], ms=9, mew=1.8)
    axes.set(xticks=range(curves.deepest + 1), xticklabels=["plain", *map(str, range(1, curves.deepest + 1))])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("depth of the draft")
    axes.set_title("Milliseconds between tokens: median, 95%, 99%")


def by_kind(curves: Curves) -> list[tuple[str, list[Dot]]]:
    """The settings measured, chains and trees apart."""
    return [(kind, [dot for dot in curves.dots if dot.chain == (kind == "chain")]) for kind in kinds(curves)]


def save(figure: Figure, path: Path) -> Path:
    """Write a figure whole or not at all, without a date, so that equal results give equal files."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_bytes(path, buffer.getvalue())
    return path
