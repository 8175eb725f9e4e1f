"""Benchmark of one or several heads: a comparison with plain decoding, and its report."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from eval.benchmark.auto import LARGEST_TREE, can_draft, start_search
from eval.benchmark.environment import contention, environment, head_facts, target_facts
from eval.benchmark.figures import Judged, judge, pooled_exactness, withhold_speed
from eval.benchmark.loading import choose_prompts, fitting_head, open_target_of
from eval.benchmark.measure import compare, engine_options
from eval.benchmark.progress import Progress
from eval.benchmark.prompts import Prompt
from eval.benchmark.reliability import headline
from eval.benchmark.results import BENCH, SCHEMA_VERSION, Results, own_folder, plain_name, write_results
from eval.benchmark.roofline import copy_bandwidth, lines, roofline
from eval.benchmark.settings import BenchSettings, to_settings
from eval.command import draft_shapes, print_line
from eval.reporting.card import check_card
from eval.reporting.format import is_exact, short_name
from eval.reporting.report import print_report, write_report
from eval.runtime.engine import Engine, EngineOptions
from heads.base import HEAD_TREE, Drafter
from heads.checkpoint import find_head
from heads.errors import UserError
from heads.files import check_folder
from heads.published import is_published
from heads.registry import untrained_kind
from heads.target.model import FrozenTarget
from heads.tree import TreeShape

COMPARISONS = Path("runs/compare")


def bench_command(options: argparse.Namespace) -> int:
    """Load the heads and the target that the options name, and measure them. Return the exit status."""
    settings, paths = to_settings(options), options.heads
    head_names(paths)  # raises UserError if a head is named twice
    parent = default_out(paths[0]) if len(paths) == 1 else COMPARISONS
    check_folder(options.out or parent, "--out")
    if options.out and len(paths) == 1:
        check_card(options.out, "--out")
    trained = [path for path in paths if not untrained_kind(path)]
    ours = [path for path in trained if not is_published(path)]  # these name their target
    target, tokenizer = open_target_of((ours or trained or paths)[0], options)
    heads = {path: fitting_head(path, target) for path in paths}
    print_line(contention(target.device))
    with own_folder(parent, settings, options) as out:
        results = run_bench(target, heads, tokenizer, settings, out=out, with_roofline=options.roofline)
    print(f"written to {out}", file=sys.stderr)
    return 0 if is_exact(results) else 1


def run_bench(
    target: FrozenTarget,
    heads: Mapping[str, Drafter],
    tokenizer: PreTrainedTokenizerBase,
    settings: BenchSettings,
    *,
    out: Path | None = None,
    console: Console | None = None,
    with_roofline: bool = False,
) -> Results:
    """Measure heads, given by their paths, in one comparison per temperature. Write and print the report, and return
    the contents of results.json, or of compare.json for several heads. `with_roofline`: also time the parts of a round
    of the headline setting (`eval.benchmark.roofline`)."""
    several, console = len(heads) > 1, console or Console()
    names, drafters = head_names(list(heads)), list(heads.values())
    if several:
        named = [fitting_shapes(head, path, target, settings) for path, head in heads.items()]
    else:
        named = [settings.shapes(drafters[0], target)]
    nodes = [shape.nodes for shapes in named for shape in shapes]
    prompts = choose_prompts(target, tokenizer, settings, max(nodes + [LARGEST_TREE] * settings.is_auto))
    judged, owners, searches = measure(target, drafters, tokenizer, settings, prompts, named)
    exact = pooled_exactness(judged.measurements, judged.unrepeatable)
    if exact["divergences"]:
        withhold_speed([*judged.measurements, *(figures for suites in judged.suites for figures in suites.values())])
    facts = [head_facts(head, path) for path, head in heads.items()]
    results: Results = {"schema_version": SCHEMA_VERSION, "target": target_facts(target)}
    results |= {**environment(target), "settings": settings.record(prompts)}
    results["command"] = measuring_command(target, list(heads), settings)
    if several:
        owned = zip(owners, judged.measurements, strict=True)
        results["heads"] = [{"name": name, **f} for name, f in zip(names, facts, strict=True)]
        results |= {"exact": exact, "measurements": [{"head": names[n], **figures} for n, figures in owned]}
        found = [{"head": names[n], **search} for n, search in searches]
    else:
        best = headline(judged.measurements)
        results |= {"head": facts[0], **judged.measurements[best], "exact": exact, "suites": judged.suites[best]}
        results |= {"measurements": judged.measurements, "samples": judged.samples[best]}
        found = [search for _, search in searches]
    if found:
        results["auto"] = found
    if with_roofline:
        results["roofline"] = parts_of_headline(target, drafters[0], prompts, settings, results)
    if out is not None:
        write_results(results, out / ("compare.json" if several else "results.json"))
        with Progress("writing the report", announced=True):
            write_report(results, out)
    print_report(results, console)
    if with_roofline:
        console.print("\n".join(lines(results["roofline"])), highlight=False, soft_wrap=True, markup=False)
    return results


def measuring_command(target: FrozenTarget, heads: Sequence[str], settings: BenchSettings) -> list[str]:
    """Return the words of the command that measures these heads again."""
    kind = ["--dtype", str(target.dtype).removeprefix("torch.")]
    quantized = ["--quantize", target.quantize] if target.quantize else []
    return ["python", "eval/bench.py", *heads, "--target", target.name, *settings.options(), *kind, *quantized]


def measure(
    target: FrozenTarget,
    heads: Sequence[Drafter],
    tokenizer: PreTrainedTokenizerBase,
    settings: BenchSettings,
    prompts: Sequence[Prompt],
    named: Sequence[Sequence[TreeShape]],
) -> tuple[Judged, list[int], list[tuple[int, Results]]]:
    """Measure the `named` shapes of each head at every temperature, and with a search those that it proposes. For one
    head, a search continues while it finds faster drafts; for several heads, it ends after one comparison.

    Return the figures of every setting, the index of each setting's head, and the index and record of each search.
    """
    judged, owners, records = Judged(), list[int](), list[tuple[int, Results]]()
    for temperature in settings.temperatures:
        trees, searches = named, []
        if settings.is_auto:
            with Progress("looking for drafts: head", len(heads)) as progress:
                for head, shapes in zip(heads, named, strict=True):
                    searches.append(start_search(target, head, prompts, temperature, settings, shapes))
                    progress.advance()
            trees = [search.next_shapes() for search in searches]
        while pairs := [(n, shape) for n, shapes in enumerate(trees) for shape in shapes]:
            drafts = [(heads[n], shape) for n, shape in pairs]
            fresh = judge(compare(target, drafts, prompts, temperature, settings), tokenizer)
            judged.add(fresh)
            owners += [n for n, _ in pairs]
            for n, search in enumerate(searches):
                search.take(m for m, (owner, _) in zip(fresh.measurements, pairs, strict=True) if owner == n)
            trees = [search.next_shapes() for search in searches] if len(heads) == 1 else []
        records += [(n, search.record(temperature)) for n, search in enumerate(searches)]
    return judged, owners, records


def fitting_shapes(head: Drafter, path: str, target: FrozenTarget, settings: BenchSettings) -> list[TreeShape]:
    """Return the trees of the settings that this head, one of several, can draft. Raise UserError if there are none."""
    own = settings.rule == "match" and head.own_tree is not None and head.own_tree.tree
    texts = tuple(tree for tree in settings.trees if tree != HEAD_TREE or own)
    shapes = replace(settings, trees=texts).shapes(head, target)
    fitting = [shape for shape in shapes if can_draft(head, target, shape, settings.rule)]
    if not fitting and not settings.is_auto:
        raise UserError(f"{path}: drafts none of {', '.join(settings.trees)}; name a tree that it can")
    return fitting


def head_names(paths: Sequence[str]) -> list[str]:
    """Return short names of heads, or their paths if short names are not distinct. Raise UserError if a path occurs
    twice."""
    if len(set(paths)) < len(paths):
        raise UserError(f"{max(paths, key=list(paths).count)}: named twice; name each head once")
    names = [path if untrained_kind(path) else short_name(path) for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def parts_of_headline(
    target: FrozenTarget, head: Drafter, prompts: Sequence[Prompt], settings: BenchSettings, results: Results
) -> Results:
    """Return the roofline of the headline setting, in the middle of an output after a prompt of median length."""
    (shape,) = draft_shapes([results["tree"]], head)
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    room = lengths[-1] + settings.max_new_tokens + shape.nodes
    length = lengths[len(lengths) // 2] + settings.max_new_tokens // 2
    engine = Engine(target, head, engine_options(settings, shape, room))
    plain = Engine(target, None, EngineOptions(batch_size=settings.batch_size, max_length=room))
    length, bandwidth = min(length, room - 3 * shape.nodes), copy_bandwidth(plain)
    return roofline(engine, plain, length=length, tau=results["tau"]["mean"], bandwidth=bandwidth)


def default_out(head: str) -> Path:
    """Return the parent folder for measurements of a head: bench/ in its run, else runs/bench-NAME."""
    if not untrained_kind(head) and not is_published(head):
        folder = Path(os.path.abspath(find_head(head)))  # without resolving links: their targets are not in the run
        if folder.name == "head" and (folder.parent / "recipe.yaml").is_file():
            return folder.parent / BENCH
    name = os.path.abspath(head) if os.path.exists(head) else head
    return Path("runs", plain_name(f"bench-{short_name(name)}"))
