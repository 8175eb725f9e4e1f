"""eval/bench.py at every batch size and context length: the measurement of eval/scaling.py."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from eval.benchmark.corpus import read_split
from eval.benchmark.figures import (
    Judged,
    environment,
    head_facts,
    judge,
    pooled_exactness,
    target_facts,
    withhold_speed,
)
from eval.benchmark.measure import compare, progress_bar
from eval.benchmark.measurements import own_folder, plain_name
from eval.benchmark.opening import open_head, prompt_room
from eval.benchmark.prompts import HELD_OUT_SUITE, Prompt, load_prompts
from eval.benchmark.results import SCHEMA_VERSION, Results, write_results
from eval.benchmark.settings import ScalingSettings
from eval.command import draft_shapes
from eval.files import check_folder
from eval.reporting.format import is_exact, short_name
from eval.reporting.scaling_report import draw_scaling, print_scaling
from heads.base import Drafter
from heads.errors import UserError, first_line
from heads.target.frozen import FrozenTarget


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
    """Measure every pair of batch size and context length, write and print it, and return what scaling.json holds. A
    point that the device's memory is too small for has no figures."""
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
    with progress_bar() as bar:
        for context in settings.contexts:
            prompts = windows(settings.prompts, tokenizer, context, max(settings.batch_sizes) * settings.batches)
            for batch_size in settings.batch_sizes:
                chosen, at = prompts[: batch_size * settings.batches], replace(settings, batch_size=batch_size)
                what = f"batch {batch_size}, context {context}"
                try:
                    result = compare(target, drafts, chosen, temperature, at, bar, what)
                    fresh = judge(result, target, tokenizer)
                except torch.OutOfMemoryError as error:
                    said: Results = {"exact": None, "speedup": None, "out_of_memory": first_line(error)}
                    fresh = Judged([{"tree": str(shape), **said} for shape in shapes])
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
        if is_exact(results):
            draw_scaling(results, out / "scaling")
    print_scaling(results, console or Console())
    return results


def windows(suite: str, tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> list[Prompt]:
    """So many prompts of so many tokens, one after another out of the suite's texts."""
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
    """The token ids of a suite's texts: whole modules of the held-out ones, else its prompts."""
    if suite == HELD_OUT_SUITE:
        for _, text in read_split(held_out=True):
            yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        yield from (prompt.ids for prompt in load_prompts(suite, tokenizer, max_prompt_tokens=sys.maxsize))


def scaling_command(options: argparse.Namespace) -> int:
    """Load what the command line names, and measure: the exit status."""
    names = {field.name for field in fields(ScalingSettings)} & vars(options).keys()
    given = {name: getattr(options, name) for name in names}
    settings = ScalingSettings(**given, temperatures=(options.temperature,))
    parent = Path("runs", plain_name(f"scaling-{Path(short_name(options.head)).name}"))
    check_folder(options.out or parent, "--out")
    opened = open_head(options)
    with own_folder(parent, settings, options) as out:
        results = measure_scaling(
            opened.target, opened.head, opened.tokenizer, settings, head_path=options.head, out=out
        )
    print(f"written to {out}", file=sys.stderr)
    return 0 if is_exact(results) else 1
