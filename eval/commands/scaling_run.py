"""Measurement of eval/scaling.py at every batch size and context length, with its table and its plot."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedTokenizerBase

from eval.benchmark.environment import contention, environment, head_facts, target_facts
from eval.benchmark.figures import Judged, judge, pooled_exactness, withhold_speed
from eval.benchmark.loading import open_head, prompt_room
from eval.benchmark.measure import compare
from eval.benchmark.prompts import HELD_OUT_SUITE, Prompt, load_prompts
from eval.benchmark.python_source import read_split
from eval.benchmark.results import SCHEMA_VERSION, Results, own_folder, plain_name, write_results
from eval.benchmark.settings import ScalingSettings
from eval.command import draft_shapes, print_line
from eval.reporting.drawing import COLOURS, save, style, title
from eval.reporting.format import (
    LEFT_OUT,
    device_text,
    heading,
    is_exact,
    left_out_text,
    number,
    sampling_text,
    short_name,
    speedup_cell,
    why_unreliable,
)
from eval.reporting.report import figure_table, print_audit
from heads.base import Drafter
from heads.errors import UserError, first_line
from heads.files import check_folder
from heads.target.frozen import FrozenTarget


def scaling_command(options: argparse.Namespace) -> int:
    """Load the head and the target that the options name, and measure them. Return the exit status."""
    names = {field.name for field in fields(ScalingSettings)} & vars(options).keys()
    given = {name: getattr(options, name) for name in names}
    settings = ScalingSettings(**given, temperatures=(options.temperature,))
    parent = Path("runs", plain_name(f"scaling-{Path(short_name(options.head)).name}"))
    check_folder(options.out or parent, "--out")
    head, target, tokenizer = open_head(options)
    print_line(contention(target.device))
    with own_folder(parent, settings, options) as out:
        results = measure_scaling(target, head, tokenizer, settings, head_path=options.head, out=out)
    print(f"written to {out}", file=sys.stderr)
    return 0 if is_exact(results) else 1


def measure_scaling(
    target: FrozenTarget,
    head: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    settings: ScalingSettings,
    *,
    head_path: str,
    out: Path | None = None,
    console: Console | None = None,
) -> Results:
    """Measure every pair of batch size and context length. Write and print the results, and return the contents of
    scaling.json. A point without figures ran out of the device's memory."""
    shapes = draft_shapes(settings.trees, head)
    (temperature,) = settings.temperatures
    room = prompt_room(target, settings.max_new_tokens, max(shape.nodes for shape in shapes))
    if max(settings.contexts) > room:
        raise UserError(
            f"--contexts {max(settings.contexts)}: with {settings.max_new_tokens} new tokens and the draft "
            f"{target.name} has room for {room}; ask for shorter ones"
        )
    drafts = [(head, shape) for shape in shapes]
    judged = Judged()
    for context in settings.contexts:
        prompts = windows(settings.prompts, tokenizer, context, max(settings.batch_sizes) * settings.batches)
        for batch_size in settings.batch_sizes:
            chosen, at = prompts[: batch_size * settings.batches], replace(settings, batch_size=batch_size)
            where = f", batch {batch_size}, context {context}"
            try:
                fresh = judge(compare(target, drafts, chosen, temperature, at, where), tokenizer)
            except torch.OutOfMemoryError as error:
                empty = {"exact": None, "speedup": None, "out_of_memory": first_line(error)}
                fresh = Judged([{"tree": str(shape), **empty} for shape in shapes])
            fresh.measurements = [{"batch_size": batch_size, "context": context, **m} for m in fresh.measurements]
            judged.add(fresh)
    points = judged.measurements
    exact = pooled_exactness([point for point in points if point["exact"]], judged.unrepeatable)
    if exact["divergences"]:
        withhold_speed(points)
    results: Results = {
        "schema_version": SCHEMA_VERSION,
        "target": target_facts(target),
        "head": head_facts(head, head_path),
        **environment(target),
        "settings": asdict(settings),
        "exact": exact,
        "points": points,
    }
    if out is not None:
        write_results(results, out / "scaling.json")
        if any(why_unreliable(point) is None for point in points):
            draw_scaling(results, out / "scaling")
    print_scaling(results, console or Console())
    return results


def windows(suite: str, tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> list[Prompt]:
    """Return `number` prompts of `length` tokens, cut one after another from the suite's texts."""
    ids: list[int] = []
    for text in texts(suite, tokenizer):
        ids += text
        if len(ids) >= length * number:
            cuts = [tuple(ids[i * length : (i + 1) * length]) for i in range(number)]
            return [
                Prompt(suite=suite, category=suite, id=str(i), text=str(tokenizer.decode(list(cut))), ids=cut)
                for i, cut in enumerate(cuts)
            ]
    raise UserError(
        f"{suite}: its texts have {len(ids)} tokens, {number} prompts of {length} need {length * number}; ask for "
        "smaller batches, shorter contexts or another suite"
    )


def texts(suite: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sequence[int]]:
    """Yield the token ids of a suite's texts: whole modules for the held-out suite, else its prompts."""
    if suite == HELD_OUT_SUITE:
        for _, text in read_split(held_out=True):
            yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        yield from (prompt.ids for prompt in load_prompts(suite, tokenizer, max_prompt_tokens=sys.maxsize))


def draw_scaling(results: Results, path: Path) -> list[Path]:
    """Draw speedup against batch size with a line for each context, and against context with a line for each batch
    size. Return the files."""
    trees = list(dict.fromkeys(point["tree"] for point in results["points"]))
    settings = results["settings"]
    with style():
        figure = Figure(figsize=(10, 0.8 + 3.6 * len(trees)), layout="constrained")
        grid: Any = figure.subplots(len(trees), 2, squeeze=False, sharey=True)
        for (left, right), tree in zip(grid, trees, strict=True):
            points = [point for point in results["points"] if point["tree"] == tree and not why_unreliable(point)]
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
    """Draw speedup against `along`, with one line for each value of `by`."""
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
    """Print a line for each point, and the audit."""
    console.print(f"\n[bold]{escape(heading(results))}[/bold]; {escape(device_text(results))}\n")
    table = figure_table(["context", "batch", "draft", "tau", "plain tokens/s", "speedup"])
    for point in results["points"]:
        figures = ["", "", "out of memory"]
        if "out_of_memory" not in point:
            rate = number(point["baseline"]["tokens_per_second"], 1)
            figures = [number(point["tau"]["mean"]), rate, speedup_cell(point)]
        table.add_row(str(point["context"]), str(point["batch_size"]), point["tree"], *figures)
    console.print(table, highlight=False)
    if any(left_out_text(point) for point in results["points"]):
        console.print(f"{LEFT_OUT}.", style="dim", highlight=False)
    console.print()
    print_audit(results, console)
