"""The report of eval/scaling.py: a table in the terminal, and the plot of its points."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.benchmark.results import Results
from eval.reporting.drawing import COLOURS, save, style, title
from eval.reporting.format import device_text, heading, number, sampling_text, short_name, speedup_text
from eval.reporting.report import print_audit


def draw_scaling(results: Results, path: Path) -> list[Path]:
    """Speedup against batch size, a line for each context, and against context, a line for each batch size."""
    trees = list(dict.fromkeys(point["tree"] for point in results["points"]))
    settings = results["settings"]
    with style():
        figure = Figure(figsize=(10, 0.8 + 3.6 * len(trees)), layout="constrained")
        grid: Any = figure.subplots(len(trees), 2, squeeze=False, sharey=True)
        for (left, right), tree in zip(grid, trees, strict=True):
            points = [point for point in results["points"] if point["tree"] == tree and point["speedup"]]
            draw_lines(left, points, "batch_size", "context", "batch size", "context")
            draw_lines(right, points, "context", "batch_size", "context, tokens of the prompt", "batch")
            left.set_title(f"{'adaptive ' * settings['adaptive']}{tree}")
        made = (
            f"{heading(results)}; {settings['batches']} batches of {short_name(settings['prompts'])} at each point, "
            f"{settings['max_new_tokens']} new tokens, {sampling_text(*settings['temperatures'])}; "
            f"{device_text(results)}"
        )
        title(figure, "Speedup over plain decoding", made)
        return save(figure, path)


def draw_lines(axes: Axes, points: Sequence[Results], along: str, by: str, label: str, legend: str) -> None:
    """One line for each value of `by`."""
    axes.axhline(1, color=COLOURS["faded"], lw=1, zorder=0)
    colours = matplotlib.colormaps["viridis"]
    values = sorted({point[by] for point in points})
    for n, value in enumerate(values):
        line = sorted((point[along], point["speedup"]["measured"]) for point in points if point[by] == value)
        colour = colours(0.9 * n / max(len(values) - 1, 1))
        axes.plot(*zip(*line, strict=True), "o-", color=colour, ms=4, lw=1.5, label=f"{legend} {value}")
    places = sorted({point[along] for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.legend(frameon=False, fontsize=8)


def print_scaling(results: Results, console: Console) -> None:
    """The table in the terminal."""
    console.print(f"\n[bold]{escape(heading(results))}[/bold]; {escape(device_text(results))}\n")
    table = Table(box=None, pad_edge=False)
    for name in ("context", "batch", "draft", "tau", "plain tokens/s", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in results["points"]:
        cells = [str(point["context"]), str(point["batch_size"]), point["tree"]]
        if "out_of_memory" in point:
            table.add_row(*cells, "", "", "out of memory")
        else:
            rate = number(point["baseline"]["tokens_per_second"], 1)
            table.add_row(*cells, number(point["tau"]["mean"]), rate, speedup_text(point))
    console.print(table, highlight=False)
    console.print()
    print_audit(results, console)
