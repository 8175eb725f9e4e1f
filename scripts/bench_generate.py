"""Compare the engine's plain decoding with `generate` of transformers: greedy, batch 1, the same prompts in turns.

    python scripts/bench_generate.py recipes/quickstart/target

Plain decoding is the baseline of every speedup, so it must be at least as fast as the library's own loop.
"""

import argparse
import sys
from collections.abc import Sequence

from eval.benchmark.settings import add_prompt_options
from eval.command import Parser, add_target_options, count, exit_status


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Plain decoding here against transformers generate.")
    parser.add_argument("target", help="a folder or a hub id")
    add_target_options(parser)
    parser.add_argument("--repeats", type=count, default=3, help="times that each decodes each prompt")
    add_prompt_options(parser, num_prompts=16, max_prompt_tokens=512, max_new_tokens=128)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.commands.generate_run import compare

    return compare(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
