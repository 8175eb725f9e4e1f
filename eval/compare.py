"""Measure several heads side by side: one target, the same prompts, plain decoding once, all of them in one race.

    python eval/compare.py runs/eagle runs/medusa runs/mtp runs/draft lookup:3 --tree chain:4,tree:4x4x16
    python eval/compare.py runs/eagle early_exit:4 --tree auto --prompts humaneval

A head is measured with every tree that it can draft; with `--tree auto`, with what suits it best. Prints a table and
writes compare.json, compare.md, compare.html and plots into --out. Exit status as of eval/bench.py.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from eval.auto import Search
from eval.command import (
    HEAD_HELP,
    Parser,
    add_target_options,
    exit_status,
    fitting_head,
    open_target_of,
    tell,
)
from eval.compare_report import show, write_comparison
from eval.contest import Judged, choose_prompts, judge, look_for_drafts, progress_bar, run_race, withhold_speed
from eval.crowding import crowding
from eval.files import check_folder
from eval.pilot import can_draft
from eval.results import (
    SCHEMA_VERSION,
    Results,
    environment,
    head_facts,
    pooled_exactness,
    target_facts,
    write_results,
)
from eval.settings import BenchSettings, add_measure_options, to_settings
from eval.wording import is_exact, short_name
from heads.base import Drafter, TreeHead
from heads.errors import UserError
from heads.own_tree import HEAD_TREE
from heads.registry import untrained_kind
from heads.target import FrozenTarget
from heads.tree import TreeShape

DEFAULT_TREES = ("chain:5", "chain:3", HEAD_TREE)
"""Something for heads that reach no depth of 5, too."""


@dataclass(frozen=True)
class Contestant:
    """A head under the name that the table gives it."""

    name: str
    head: Drafter
    path: str


def compare(
    target: FrozenTarget,
    contestants: Sequence[Contestant],
    tokenizer: PreTrainedTokenizerBase,
    settings: BenchSettings,
    *,
    out: Path | None = None,
    console: Console | None = None,
) -> Results:
    """Measure the heads in one race a temperature, print the table, and return what compare.json holds."""
    settings.check_target(target)
    named = [named_shapes(contestant, target, settings) for contestant in contestants]
    most = settings.most_nodes([shape for shapes in named for shape in shapes])
    prompts = choose_prompts(target, tokenizer, settings, most)
    judged = Judged()
    owners: list[int] = []
    looked: list[Results] = []
    with progress_bar() as bar:
        for temperature in settings.temperatures:
            searches: list[Search] = []
            if settings.is_auto:
                searches = [
                    look_for_drafts(target, c.head, prompts, temperature, settings, shapes, bar)
                    for c, shapes in zip(contestants, named, strict=True)
                ]
            trees = [search.next_shapes() for search in searches] or named
            pairs = [(n, shape) for n, shapes in enumerate(trees) for shape in shapes]
            entries = [settings.entry(contestants[n].head, shape) for n, shape in pairs]
            fresh = judge(run_race(target, entries, prompts, temperature, settings, bar), target, tokenizer)
            judged.add(fresh)
            owners += [n for n, _ in pairs]
            for n, search in enumerate(searches):
                search.take(m for m, (owner, _) in zip(fresh.measurements, pairs, strict=True) if owner == n)
                looked.append({"head": contestants[n].name, **search.record(temperature)})
    exact = pooled_exactness(judged.measurements, judged.unrepeatable)
    if exact["divergences"]:
        withhold_speed(judged.measurements)
    results: Results = {
        "schema_version": SCHEMA_VERSION,
        "target": target_facts(target),
        "heads": [{"name": c.name, **head_facts(c.head, c.path)} for c in contestants],
        **environment(target),
        "settings": settings.record(prompts),
        "exact": exact,
        "measurements": [{"head": contestants[n].name, **m} for n, m in zip(owners, judged.measurements, strict=True)],
        **({"auto": looked} if looked else {}),
    }
    if out is not None:
        write_results(results, out / "compare.json")
        write_comparison(results, out)
    show(results, console or Console())
    return results


def named_shapes(contestant: Contestant, target: FrozenTarget, settings: BenchSettings) -> list[TreeShape]:
    """The trees that the settings name and this head drafts. UserError if there are none."""
    head = contestant.head
    own = settings.rule == "match" and isinstance(head, TreeHead) and head.tree
    texts = tuple(tree for tree in settings.trees if tree != HEAD_TREE or own)
    shapes = replace(settings, trees=texts).shapes(head)
    fitting = [shape for shape in shapes if can_draft(head, target, shape, settings.rule)]
    if not fitting and not settings.is_auto:
        raise UserError(f"{contestant.path}: drafts none of {', '.join(settings.trees)}; name a tree that it can")
    return fitting


def compare_command(options: argparse.Namespace) -> int:
    """Load what the command line names, and compare: the exit status."""
    settings = to_settings(options)
    check_folder(options.out, "--out")
    trained = [path for path in options.heads if not untrained_kind(path)]
    target, tokenizer = open_target_of((trained or options.heads)[0], options)
    names = head_names(options.heads)
    contestants = [
        Contestant(name, fitting_head(path, target), path) for name, path in zip(names, options.heads, strict=True)
    ]
    tell(crowding(target.device))
    results = compare(target, contestants, tokenizer, settings, out=options.out)
    print(f"written to {options.out}", file=sys.stderr)
    return 0 if is_exact(results) else 1


def head_names(paths: Sequence[str]) -> list[str]:
    """Short names, or the paths where those are not told apart. UserError where one is named twice."""
    if len(set(paths)) < len(paths):
        raise UserError(f"{max(paths, key=list(paths).count)}: named twice; name each head once")
    names = [path if untrained_kind(path) else short_name(path) for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Measure several heads of one target side by side.")
    parser.add_argument("heads", nargs="+", help=HEAD_HELP)
    parser.add_argument("--target", help="the target's path; by default the one the first head was trained for")
    add_target_options(parser)
    add_measure_options(parser)
    parser.set_defaults(out=Path("runs/compare"), trees=",".join(DEFAULT_TREES))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: compare_command(parse_arguments())))
