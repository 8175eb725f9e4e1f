"""Measure tokens per round of every acceptance rule, for one head, on every tree that the rule can judge.

    python scripts/bench_rules.py runs/quickstart --num-prompts 64 --seeds 4 --out eval/results/rules.json

Every prompt is sampled under every rule with several seeds. tau is tokens per round. Rules are compared on the same
tree, paired over prompts. On chains, `block` and `ratio` are also compared on the same drafts, by the expected number
of tokens that each rule emits. It is a sum over the nodes of the chain, so it is free of the noise of the tests.
"""

import argparse
import sys
from collections.abc import Sequence

from eval.benchmark.settings import add_prompt_options
from eval.command import Parser, add_head_options, count, exit_status, trees


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Compare the acceptance rules for a head: tokens emitted a round.")
    add_head_options(parser)
    add = parser.add_argument
    add(
        "--tree",
        dest="trees",
        type=trees,
        default="chain:5,static:3.2.1,tree:5x4x16",
        help="drafts, separated by commas",
    )
    add("--temperature", type=float, default=1.0)
    add("--seeds", type=count, default=4, help="texts sampled from each prompt")
    add("--batch-size", type=count, default=8, help="texts decoded together; tau does not depend on it")
    add_prompt_options(parser, num_prompts=64, max_prompt_tokens=96, max_new_tokens=64)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.commands.rules_run import bench_rules

    return bench_rules(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
