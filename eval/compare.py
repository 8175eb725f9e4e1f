"""Measure several heads side by side: one target, the same prompts, plain decoding once, all of them in one comparison.

    python eval/compare.py runs/eagle runs/medusa runs/mtp runs/draft lookup:3 --tree chain:4,tree:4x4x16
    python eval/compare.py runs/eagle early_exit:4 --tree auto --prompts humaneval

A head is measured with every tree that it can draft; with `--tree auto`, with what suits it best. Prints a table and
writes compare.json, compare.md, compare.html and plots into a new folder of runs/compare, or into --out. Exit status as
of eval/bench.py.
"""

import argparse
import sys
from collections.abc import Sequence

from eval.benchmark.settings import add_measure_options
from eval.command import HEAD_HELP, Parser, add_target_options, exit_status
from heads.base import HEAD_TREE

DEFAULT_TREES = ("chain:5", "chain:3", HEAD_TREE)
"""Default trees, one of which suits heads of a depth below 5."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Measure several heads of one target side by side.")
    parser.add_argument("heads", nargs="+", help=HEAD_HELP)
    parser.add_argument("--target", help="the target's path; by default the one the first head was trained for")
    add_target_options(parser)
    add_measure_options(parser)
    parser.set_defaults(trees=",".join(DEFAULT_TREES))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.commands.compare_run import compare_command

    return compare_command(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
