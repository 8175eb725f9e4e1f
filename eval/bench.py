"""Measure draft heads: acceptance length (tau), acceptance by depth, speedup over plain decoding, and exactness.

    python eval/bench.py runs/quickstart
    python eval/bench.py HEAD_DIR_OR_HUB_ID --prompts mt_bench,humaneval --tree chain:5,tree:5x8x24 --temperature 0,1
    python eval/bench.py runs/eagle runs/medusa runs/mtp runs/draft lookup:3

One head: writes results.json, report.html, plots and a model card into a new folder, here in runs/quickstart/bench, or
into --out.

Several heads: all are measured in one comparison, on the target of the first head that names one. Each head drafts
every tree that it can, or with `--tree auto` the fastest trees that a search finds for it. Writes compare.json,
compare.md, compare.html and plots into a new folder in runs/compare, or into --out.

Every output is compared with that of plain decoding, token by token. Exit status: 0; 1 if an output was not the
target's own (then no speedup is reported); 2, with one line, for an error that the user can fix.
"""

import argparse
import sys
from collections.abc import Sequence

from eval.benchmark.settings import add_measure_options
from eval.command import Parser, add_head_options, exit_status
from heads.base import HEAD_TREE

TREES = ("chain:5",)
TREES_OF_SEVERAL = ("chain:5", "chain:3", HEAD_TREE)
"""Default trees for several heads. They include one for heads with a depth below 5."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Measure draft heads: tau and speed, and compare every token with plain decoding.")
    add_head_options(parser, several=True)
    parser.add_argument("--head", metavar="HEAD", help="the head, as wandb's sweep agent passes it")
    add_measure_options(parser)
    parser.add_argument(
        "--roofline", action="store_true", help="compare the time of every part of a round with its lower bound"
    )
    options = parser.parse_args([hyphenated(word) for word in (sys.argv[1:] if arguments is None else arguments)])
    if bool(options.heads) == bool(options.head):
        parser.error("expected a head, or several")
    options.heads = options.heads or [options.head]
    if options.roofline and len(options.heads) > 1:
        parser.error("--roofline: is of one head; name one")
    options.trees = options.trees or (TREES if len(options.heads) == 1 else TREES_OF_SEVERAL)
    return options


def hyphenated(word: str) -> str:
    """Return an option with hyphens in its name. Sweeps spell it with underscores: --batch_size=4."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.commands.bench_run import bench_command

    return bench_command(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
