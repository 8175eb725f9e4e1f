"""Measure a head's speedup over plain decoding as a function of batch size and context length.

    python eval/scaling.py runs/quickstart --batch-sizes 1,2,4,8 --contexts 64,256,768 [--adaptive] [--out DIR]

At every point the same prompts are decoded plainly and with each draft, in turns, and every token is compared. Prompts
are windows of the suite's texts, each as long as the context. Writes scaling.json, scaling.png and scaling.svg into a
new folder in runs/scaling-NAME, or into --out. The exit status is that of eval/bench.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.benchmark.settings import ScalingSettings
from eval.command import Parser, add_head_options, count, counts, exit_status, temperature
from eval.command import seed as seed_number
from eval.command import trees as tree_names


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    known = ScalingSettings()
    parser = Parser("Measure a head's speedup against batch size and context length.")
    add_head_options(parser)
    add = parser.add_argument
    add("--batch-sizes", type=counts, default=known.batch_sizes, help="separated by commas")
    add("--contexts", type=counts, default=known.contexts, help="tokens of each prompt, separated by commas")
    add("--tree", dest="trees", type=tree_names, default=known.trees, help="drafts, separated by commas")
    add("--adaptive", action="store_true", help="shorten or skip drafts while that is faster")
    add("--prompts", default=known.prompts, help="a suite or a file; its texts are cut into windows")
    add("--batches", type=count, default=known.batches, help="batches of prompts at each point")
    add("--max-new-tokens", type=count, default=known.max_new_tokens, help="most new tokens of each prompt")
    add("--temperature", type=temperature, default="0", help="0 is greedy")
    add("--repeats", type=count, default=known.repeats, help="times that each point is measured")
    add("--seed", type=seed_number, default=known.seed, help="seed of the sampling")
    add("--out", type=Path, help="folder for the results; default: a new one in runs/scaling-NAME")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.commands.scaling_run import scaling_command

    return scaling_command(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
