"""The benchmark of one head: its comparison against plain decoding, and the report."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from eval.benchmark.comparison import (
    Judged,
    check_target,
    choose_prompts,
    judge,
    look_for_drafts,
    make_variant_spec,
    most_nodes,
    progress_bar,
    run_comparison,
    withhold_speed,
)
from eval.benchmark.contention import contention
from eval.benchmark.figures import environment, head_facts, headline, pooled_exactness, target_facts
from eval.benchmark.measurements import BENCH, own_folder, plain_name
from eval.benchmark.opening import open_head
from eval.benchmark.prompts import Prompt
from eval.benchmark.roofline import lines, run_roofline
from eval.benchmark.settings import BenchSettings, to_settings
from eval.command import draft_shapes, tell
from eval.files import check_folder
from eval.reporting.format import short_name
from eval.reporting.report import check_card, print_report, write_report
from eval.reporting.results import SCHEMA_VERSION, Results, write_results
from eval.runtime.engine import Engine
from heads.base import Drafter
from heads.checkpoint import find_head
from heads.registry import untrained_kind
from heads.target.frozen import FrozenTarget
from heads.tree import TreeShape


def run_bench(
    target: FrozenTarget,
    head: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    settings: BenchSettings,
    *,
    head_path: str,
    out: Path | None = None,
    console: Console | None = None,
    with_roofline: bool = False,
) -> Results:
    """Measure a head on a target, write and print the report, and return what results.json holds. `with_roofline`: the
    parts of a round of the headline setting, timed one by one beside the floor of each (`eval.benchmark.roofline`)."""
    check_target(settings, target)
    named = settings.shapes(head)
    prompts = choose_prompts(target, tokenizer, settings, most_nodes(settings, named))
    judged, searches = measure_settings(target, head, tokenizer, settings, prompts, named)
    measurements, suites = judged.measurements, judged.suites
    best = headline(measurements)
    exact = pooled_exactness(measurements, judged.unrepeatable)
    if exact["divergences"]:
        withhold_speed([*measurements, *(figure for suite in suites for figure in suite.values())])
    results: Results = {
        "schema_version": SCHEMA_VERSION,
        "target": target_facts(target),
        "head": head_facts(head, head_path),
        **environment(target),
        "settings": settings.record(prompts),
        **measurements[best],
        "exact": exact,
        "suites": suites[best],
        "measurements": measurements,
        **({"auto": searches} if searches else {}),
        "samples": judged.samples[best],
    }
    console = console or Console()
    if with_roofline:
        results["roofline"] = parts_of_headline(target, head, prompts, settings, results)
    if out is not None:
        write_results(results, out / "results.json")
        write_report(results, out)
    print_report(results, console)
    if with_roofline:
        console.print("\n".join(lines(results["roofline"])), highlight=False, soft_wrap=True, markup=False)
    return results


def measure_settings(
    target: FrozenTarget,
    head: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    settings: BenchSettings,
    prompts: Sequence[Prompt],
    named: Sequence[TreeShape],
) -> tuple[Judged, list[Results]]:
    """Measure the `named` shapes, or what a search comes upon beside them, at every temperature: the figures of all,
    and a record of each search."""
    judged, searches = Judged(), []
    with progress_bar() as bar:
        for temperature in settings.temperatures:
            search, shapes = None, named
            if settings.is_auto:
                search = look_for_drafts(target, head, prompts, temperature, settings, named, bar)
                shapes = search.next_shapes()
            while shapes:
                entries = [make_variant_spec(settings, head, shape) for shape in shapes]
                fresh = judge(run_comparison(target, entries, prompts, temperature, settings, bar), target, tokenizer)
                judged.add(fresh)
                shapes = []
                if search is not None:
                    search.take(fresh.measurements)
                    shapes = search.next_shapes()
            if search is not None:
                searches.append(search.record(temperature))
    return judged, searches


def parts_of_headline(
    target: FrozenTarget, head: Drafter, prompts: Sequence[Prompt], settings: BenchSettings, results: Results
) -> Results:
    """The roofline of the headline setting, in the middle of an output after a prompt of the middle length."""
    (shape,) = draft_shapes([results["tree"]], head)
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    room = lengths[-1] + settings.max_new_tokens + shape.nodes
    size: dict[str, Any] = {"batch_size": settings.batch_size, "max_length": room}
    engine = Engine(target, head, shape=shape, rule=settings.rule, strict=settings.strict, **size)
    length = lengths[len(lengths) // 2] + settings.max_new_tokens // 2
    return run_roofline(engine, tau=results["tau"]["mean"], length=min(length, room - 3 * shape.nodes))


def bench_command(options: argparse.Namespace) -> int:
    """Load what the command line names, and measure: the exit status."""
    settings = to_settings(options)
    parent = default_out(options.head)
    check_folder(options.out or parent, "--out")
    if options.out:
        check_card(options.out, "--out")
    opened = open_head(options)
    tell(contention(opened.target.device))
    with own_folder(parent, settings, options) as out:
        results = run_bench(
            opened.target,
            opened.head,
            opened.tokenizer,
            settings,
            head_path=options.head,
            out=out,
            with_roofline=options.roofline,
        )
    print(f"written to {out}", file=sys.stderr)
    return 1 if results["exact"]["divergences"] else 0


def default_out(head: str) -> Path:
    """The folder in which measurements of a head get folders of their own: bench/ in its run, else runs/bench-NAME."""
    if not untrained_kind(head):
        folder = Path(os.path.abspath(find_head(head)))  # as it was named: where a link leads there is no run
        if folder.name == "head" and (folder.parent / "recipe.yaml").is_file():
            return folder.parent / BENCH
    name = os.path.abspath(head) if os.path.exists(head) else head
    return Path("runs", plain_name(f"bench-{short_name(name)}"))
