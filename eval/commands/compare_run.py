"""The benchmark of several heads in one comparison: its table, page and plots, comparison.json and comparison.md."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from eval.benchmark.auto import Search
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
from eval.benchmark.figures import environment, head_facts, pooled_exactness, target_facts
from eval.benchmark.measurements import own_folder
from eval.benchmark.opening import fitting_head, open_target_of
from eval.benchmark.results import SCHEMA_VERSION, Results, write_results
from eval.benchmark.settings import BenchSettings, to_settings
from eval.benchmark.tune import can_draft
from eval.command import tell
from eval.files import check_folder
from eval.reporting.compare_report import show, write_comparison
from eval.reporting.format import is_exact, short_name
from heads.base import HEAD_TREE, Drafter
from heads.errors import UserError
from heads.registry import untrained_kind
from heads.target.frozen import FrozenTarget
from heads.tree import TreeShape

FOLDER = Path("runs/compare")


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
    """Measure the heads in one comparison a temperature, print the table, and return what comparison.json holds."""
    check_target(settings, target)
    named = [named_shapes(contestant, target, settings) for contestant in contestants]
    most = most_nodes(settings, [shape for shapes in named for shape in shapes])
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
            entries = [make_variant_spec(settings, contestants[n].head, shape) for n, shape in pairs]
            fresh = judge(run_comparison(target, entries, prompts, temperature, settings, bar), target, tokenizer)
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
    own = settings.rule == "match" and head.own_tree is not None and head.own_tree.tree
    texts = tuple(tree for tree in settings.trees if tree != HEAD_TREE or own)
    shapes = replace(settings, trees=texts).shapes(head)
    fitting = [shape for shape in shapes if can_draft(head, target, shape, settings.rule)]
    if not fitting and not settings.is_auto:
        raise UserError(f"{contestant.path}: drafts none of {', '.join(settings.trees)}; name a tree that it can")
    return fitting


def compare_command(options: argparse.Namespace) -> int:
    """Load what the command line names, and comparison: the exit status."""
    settings = to_settings(options)
    check_folder(options.out or FOLDER, "--out")
    trained = [path for path in options.heads if not untrained_kind(path)]
    target, tokenizer = open_target_of((trained or options.heads)[0], options)
    names = head_names(options.heads)
    contestants = [
        Contestant(name, fitting_head(path, target), path) for name, path in zip(names, options.heads, strict=True)
    ]
    tell(contention(target.device))
    with own_folder(FOLDER, settings, options) as out:
        results = compare(target, contestants, tokenizer, settings, out=out)
    print(f"written to {out}", file=sys.stderr)
    return 0 if is_exact(results) else 1


def head_names(paths: Sequence[str]) -> list[str]:
    """Return short names, or the paths if those are not distinct. UserError if one is named twice."""
    if len(set(paths)) < len(paths):
        raise UserError(f"{max(paths, key=list(paths).count)}: named twice; name each head once")
    names = [path if untrained_kind(path) else short_name(path) for path in paths]
    return names if len(set(names)) == len(names) else list(paths)
