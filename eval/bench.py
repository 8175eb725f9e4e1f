"""Measure one head: tau, acceptance, speed against plain decoding, and whether every token is the target's.

    python eval/bench.py runs/quickstart
    python eval/bench.py HEAD_DIR_OR_HUB_ID --prompts mt_bench,humaneval --tree chain:5,tree:5x8x24 --temperature 0,1

Writes results.json, report.html, plots and a model card's section into --out. Exit status 0; 1 if an output was not the
target's own (then no speedup is printed); 2 with one line for what the caller can mend.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from eval.audit import audit
from eval.auto import start_search
from eval.command import Parser, add_head_options, exit_status, open_head, prompt_room
from eval.files import check_folder
from eval.measure import Entry, OnUnit, find_divergences, race
from eval.prompts import Prompt, follow_up, load_prompts, prompts_hash
from eval.report import print_report, write_report
from eval.results import (
    SCHEMA_VERSION,
    Results,
    by_suite,
    environment,
    figures,
    head_facts,
    headline,
    pooled_exactness,
    samples,
    target_facts,
    write_results,
)
from eval.runtime.engine import Engine, Request
from eval.settings import BenchSettings, add_measure_options, to_settings
from heads.base import Drafter
from heads.checkpoint import find_head
from heads.registry import HEADS, UNTRAINED, untrained_kind
from heads.target import FrozenTarget


def run_bench(
    target: FrozenTarget,
    head: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    settings: BenchSettings,
    *,
    head_path: str,
    out: Path | None = None,
    console: Console | None = None,
) -> Results:
    """Measure a head on a target, write and print the report, and return what results.json holds."""
    named = settings.shapes(head)
    prompts = choose_prompts(target, tokenizer, settings, settings.most_nodes(head))
    measurements, suites, shown, unrepeatable, searches = [], [], [], [], []
    with progress_bar() as bar:
        for temperature in settings.temperatures:
            sampling, shapes = settings.sampling(temperature), named
            search = None
            if settings.is_auto:
                bar.add_task("looking for drafts", total=None)
                search = start_search(
                    target,
                    head,
                    prompts,
                    sampling,
                    max_new_tokens=settings.max_new_tokens,
                    batch_size=settings.batch_size,
                    fixed=named,
                )
                shapes = search.next_shapes()
            while shapes:
                result = race(
                    target,
                    [Entry(head, shape, settings.rule) for shape in shapes],
                    prompts,
                    sampling,
                    max_new_tokens=settings.max_new_tokens,
                    batch_size=settings.batch_size,
                    repeats=settings.repeats,
                    on_unit=race_bar(bar, settings.repeats * (1 + len(shapes)) * len(prompts)),
                )
                unrepeatable += find_divergences(result, result.plain, target, tokenizer)
                for contender, divergences in zip(result.drafting, audit(result, target, tokenizer), strict=True):
                    measurements.append(figures(result, contender, divergences, range(len(result.units))))
                    suites.append(by_suite(result, contender, divergences))
                    shown.append(samples(result, contender, tokenizer))
                shapes = []
                if search is not None:
                    search.take(measurements[-len(result.drafting) :])
                    shapes = search.next_shapes()
            if search is not None:
                searches.append(search.record(temperature))
    best = headline(measurements)
    exact = pooled_exactness(measurements, unrepeatable)
    if exact["divergences"]:
        withhold_speed([*measurements, *(figure for suite in suites for figure in suite.values())])
    results: Results = {
        "schema_version": SCHEMA_VERSION,
        "target": target_facts(target),
        "head": head_facts(head, kind_of(head), head_path),
        **environment(target),
        "settings": {**asdict(settings), "num_prompts": len(prompts), "prompts_hash": prompts_hash(prompts)},
        **measurements[best],
        "exact": exact,
        "suites": suites[best],
        "measurements": measurements,
        **({"auto": searches} if searches else {}),
        "samples": shown[best],
    }
    if out is not None:
        write_results(results, out / "results.json")
        write_report(results, out)
    print_report(results, console or Console())
    return results


def withhold_speed(measurements: Sequence[Results]) -> None:
    """Where the audit failed, no speedup is stated anywhere."""
    for measurement in measurements:
        measurement["speedup"] = None


def choose_prompts(
    target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, settings: BenchSettings, most_nodes: int
) -> list[Prompt]:
    """The prompts of every suite, each with room for a tree of `most_nodes`, later turns of conversations included:
    those follow the target's own greedy answers."""
    room = prompt_room(target, settings.max_new_tokens, most_nodes)
    limit = min(settings.max_prompt_tokens or room, room)
    prompts = []
    for suite in settings.prompts.split(","):
        prompts += load_prompts(
            suite.strip(),
            tokenizer,
            num_prompts=settings.num_prompts,
            max_prompt_tokens=limit,
            seed=settings.seed,
            skip_long=settings.skip_long,
        )
    open_turns = [prompt for prompt in prompts if prompt.later_turns]
    engine = Engine(target, batch_size=settings.batch_size, max_length=limit + settings.max_new_tokens + 1)
    while open_turns:
        answers = engine.generate([Request(list(p.ids), settings.max_new_tokens) for p in open_turns])
        texts = [str(tokenizer.decode(answer.tokens, skip_special_tokens=True)) for answer in answers]
        # A conversation that has grown past the room is left where it is: its later turns are no fault of the prompt
        # file.
        grown = [follow_up(prompt, text, tokenizer) for prompt, text in zip(open_turns, texts, strict=True)]
        grown = [prompt for prompt in grown if len(prompt.ids) <= limit]
        prompts += grown
        open_turns = [prompt for prompt in grown if prompt.later_turns]
    return prompts


def kind_of(head: Drafter) -> str:
    """The head's name in the registry."""
    return next(kind for kind, cls in {**HEADS, **UNTRAINED}.items() if isinstance(head, cls))


def race_bar(bar: Progress, total: int) -> OnUnit:
    """A bar for one race, in the place of what was shown before."""
    for task in bar.task_ids:
        bar.remove_task(task)
    task = bar.add_task("measuring", total=total)
    return lambda count: bar.advance(task, count)


def progress_bar() -> Progress:
    """A bar on standard error, where that is a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def bench_command(options: argparse.Namespace) -> int:
    """Load what the command line names, and measure: the exit status."""
    settings = to_settings(options)
    untrained = untrained_kind(options.head)
    out = options.out or default_out(Path(options.head.replace(":", "-")) if untrained else find_head(options.head))
    check_folder(out, "--out")
    opened = open_head(options)
    results = run_bench(opened.target, opened.head, opened.tokenizer, settings, head_path=options.head, out=out)
    print(f"written to {out}", file=sys.stderr)
    return 1 if results["exact"]["divergences"] else 0


def default_out(folder: Path) -> Path:
    """bench/ in the run the head is of, else bench-NAME here; never the run's own results."""
    run = folder.resolve().parent
    if folder.name == "head" and (run / "recipe.yaml").is_file():
        return run / "bench"
    return Path(f"bench-{folder.resolve().name}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Measure a draft head: tau, speed, and whether every token is the target's.")
    add_head_options(parser)
    add_measure_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: bench_command(parse_arguments())))
