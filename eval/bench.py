"""Measure draft heads: acceptance length (tau), acceptance by depth, speedup over plain decoding, and exactness.

    python eval/bench.py runs/quickstart
    python eval/bench.py HEAD_DIR_OR_HUB_ID --prompts mt_bench,humaneval --tree chain:5,tree:5x8x24 --temperature 0,1
    python eval/bench.py runs/quickstart --batch-size 1,2,4,8 --context 64,256,768    # each combination is a setting
    python eval/bench.py runs/eagle runs/medusa runs/mtp runs/draft lookup:3
    python eval/bench.py runs/quickstart --no-timing --batch-size 1,8                 # an audit alone
    python eval/bench.py --server http://localhost:8000 --plain-server http://localhost:8001   # a vLLM or SGLang

One head: writes results.json, report.html, plots and a model card into a new folder, here in runs/quickstart/bench, or
into --out. --wandb online (or offline) also makes it a wandb run, as a sweep's agent does. A measurement of a server
writes no model card.

Several heads: all are measured in one comparison, on the target of the first head that names one. Each head drafts
every tree that it can, or with `--tree auto` the fastest trees that a search finds for it. Writes compare.json,
compare.md, compare.html and plots into a new folder in runs/compare, or into --out.

Every output is compared with that of plain decoding, token by token. Exit status: 0; 1 if an output was not the
target's own (then no speedup is reported); 2, with one line, for an error that the user can fix.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import (
    OFF,
    Parser,
    add_head_options,
    add_wandb_option,
    check_depths,
    exit_status,
    print_line,
    typed,
)
from eval.data.prompts import check_suites, split_prompts
from eval.records.measure_settings import BenchSettings, add_measure_options, to_settings
from eval.records.result_folders import BENCH, own_folder, plain_name, short_name
from eval.servers.openai_client import check_url
from heads.core.contract import HEAD_TREE, LOOKUP, split_draft
from heads.core.files import is_file

DEFAULTS = BenchSettings()
TREES_OF_SEVERAL = ("chain:5", "chain:3", HEAD_TREE)
"""Default trees for several heads. They include one for heads with a depth below 5."""
COMPARISONS = Path("runs/compare")
FIRST = (
    *("target", "prompts", "num_prompts", "trees", "temperatures", "rule", "batch_sizes"),
    *("timing", "server", "out"),
)
"""Options that --help explains."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Measure draft heads: tau and speed, and compare every token with plain decoding.", first=FIRST)
    add_head_options(parser, several=True)
    add_measure_options(parser)
    address = typed(Annotated[str, AfterValidator(check_url)])
    parser.add_argument(
        "--server", type=address, metavar="URL", help="measure this running vLLM, SGLang or llama-server"
    )
    parser.add_argument(
        "--plain-server", type=address, metavar="URL", help="the same target served without a draft, for the speedup"
    )
    parser.add_argument(
        "--roofline", action="store_true", help="compare the time of every part of a round with its lower bound"
    )
    add_wandb_option(parser, "log the measurement of one head as a wandb run")
    options = parser.parse_args([unswept(word) for word in (sys.argv[1:] if arguments is None else arguments)])
    if not (options.heads or options.server):
        parser.error("expected a head, or several")
    used = {"tree": "trees", "context": "contexts", "rule": "rule", "no-timing": "timing"}
    chosen = [name for name, setting in used.items() if setting in options]
    chosen += ["roofline"] * options.roofline + ["wandb"] * (options.wandb != OFF)
    if options.plain_server and not options.server:
        parser.error("--plain-server: requires --server")
    if options.server and (chosen or len(options.heads) > 1):
        parser.error(f"{f'--{chosen[0]}' if chosen else 'several heads'}: not supported with --server")
    if {"roofline", "wandb"}.intersection(chosen) and (len(options.heads) > 1 or "no-timing" in chosen):
        parser.error(f"--{chosen[-1]}: requires exactly one head and timing")
    check_depths(getattr(options, "trees", ()), getattr(options, "max_new_tokens", DEFAULTS.max_new_tokens))
    vars(options).setdefault("trees", DEFAULTS.trees if len(options.heads) < 2 else TREES_OF_SEVERAL)
    return options


def unswept(word: str) -> str:
    """Return a word of the command line in our form. Sweeps write --batch_size=4 and, for the head, --head=HEAD."""
    name, equals, value = word.partition("=")
    if name == "--head" and equals:
        return value
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    settings, paths = to_settings(options), options.heads
    if options.server:
        return measure_served(options, settings)
    from rich.console import Console

    from eval.measure.bench_heads import bench_heads, head_names
    from eval.measure.machine import settle_threads
    from eval.measure.open_models import fitting_head, open_target_of
    from eval.pages.card import check_card
    from eval.pages.run_report import save_and_print
    from eval.pages.wandb_run import tracked
    from heads.published import is_published
    from heads.registry import untrained_kind
    from heads.saved import find_head, read_config

    head_names(paths)  # raises UserError if a head is named twice
    parent = default_out(paths[0]) if len(paths) == 1 else COMPARISONS
    if options.out and len(paths) == 1:
        check_card(options.out, "--out")
    check_suites(settings.prompts)
    folders = [split_draft(path)[1] for path in paths]
    trained = [path for path in folders if not untrained_kind(path)]
    ours = [path for path in trained if not is_published(path)]  # these name their target
    for path in ours:
        read_config(find_head(path))  # raises UserError for one that is not there, before a target is loaded
    with own_folder(parent, settings, options, about(options)) as (out, journal), tracked(options, out) as log:
        target, tokenizer = open_target_of((ours or trained or paths)[0], options)
        heads = {path: fitting_head(path, target) for path in paths}
        print_line(settle_threads(target.device))
        results = bench_heads(target, heads, tokenizer, settings, with_roofline=options.roofline, journal=journal)
        save_and_print(results, out, Console())
        log(results)
    print(f"written to {out}", file=sys.stderr)
    return 0 if results.is_exact else 1


def measure_served(options: argparse.Namespace, settings: BenchSettings) -> int:
    from rich.console import Console

    from eval.pages.run_report import save_and_print
    from eval.servers.bench_server import bench_server

    parent = default_out(options.heads[0]) if options.heads else Path("runs", plain_name(f"bench-{options.server}"))
    check_suites(settings.prompts)
    with own_folder(parent, settings, options, about(options)) as (out, journal):
        results = bench_server(options, settings, journal)
        save_and_print(results, out, Console())
    print(f"written to {out}", file=sys.stderr)
    return 0 if results.is_exact else 1


def about(options: argparse.Namespace) -> dict[str, object]:
    """Return what the times of a measurement depend on: an interrupted one goes on only where all is the same."""
    import torch

    from eval.measure.machine import device_facts, versions

    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    device = device_facts(torch.device("cuda" if on_gpu else "cpu"))
    return {"command": identity(options), "versions": versions(), "device": device}


def identity(options: argparse.Namespace) -> str:
    """Return a hash of everything that the figures of a command depend on: options, heads and prompt files."""
    from heads.saved import weights_hash

    files = [Path(name).read_bytes() for name in split_prompts(to_settings(options).prompts) if is_file(name)]
    named = sorted((name, value) for name, value in vars(options).items() if name not in ("out", "wandb"))
    facts = repr((named, [weights_hash(split_draft(head)[1]) for head in options.heads], files))
    return hashlib.sha256(facts.encode()).hexdigest()[:8]


def default_out(head: str) -> Path:
    """Return the parent folder for measurements of a head: bench/ in its run, else runs/bench-NAME."""
    from heads.published import is_published
    from heads.registry import untrained_kind
    from heads.saved import find_head

    match, path = split_draft(head)
    if match is None and not untrained_kind(head) and not is_published(head):
        folder = Path(os.path.abspath(find_head(head)))  # without resolving links: their targets are not in the run
        if folder.name == "head" and (folder.parent / "recipe.yaml").is_file():
            return folder.parent / BENCH
    name = os.path.abspath(path) if os.path.exists(path) else path
    lookup = "" if match is None else f"{LOOKUP}{match}+"
    return Path("runs", plain_name(f"bench-{short_name(f'{lookup}{name}')}"))


if __name__ == "__main__":
    sys.exit(exit_status(main))
