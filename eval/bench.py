"""Measure one head: tau, acceptance, speed against plain decoding, and an audit of every token.

    python eval/bench.py runs/quickstart
    python eval/bench.py HEAD_DIR_OR_HUB_ID --prompts mt_bench,humaneval --tree chain:5,tree:5x8x24 --temperature 0,1

Writes results.json, report.html, plots and a model card into a new folder for every measurement, here in
runs/quickstart/bench, or into --out. Exit status 0; 1 if an output was not the target's own (then no speedup is
printed); 2 with one line for what the caller can mend.
"""

import argparse
import sys
from collections.abc import Sequence

from eval.benchmark.settings import add_measure_options
from eval.command import Parser, add_head_options, exit_status


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Measure a draft head: tau, speed, and whether every token is the target's.")
    add_head_options(parser, optional=True)
    parser.add_argument("--head", dest="named", metavar="HEAD", help="the head, as a sweep's agent names it")
    add_measure_options(parser)
    parser.add_argument("--roofline", action="store_true", help="time every part of a round beside its floor")
    options = parser.parse_args([hyphenated(word) for word in (sys.argv[1:] if arguments is None else arguments)])
    if (options.head is None) == (options.named is None):
        parser.error("expected a head, once")
    options.head = options.head or options.named
    return options


def hyphenated(word: str) -> str:
    """Rewrite an option in the spelling of sweeps, --batch_size=4, with hyphens in its name."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.commands.bench_run import bench_command

    return bench_command(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
