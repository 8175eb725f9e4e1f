"""Verify on many prompts that the output with a head is the target's own, token for token.

    python scripts/audit.py runs/quickstart

Decodes every prompt plainly and with every draft at every temperature and batch size. All must emit the same tokens as
plain decoding. An EOS does not end an output. Exit status: 1 if any token differs.
"""

import argparse
import sys
from collections.abc import Sequence

from eval.benchmark.settings import add_prompt_options
from eval.command import Parser, add_head_options, counts, exit_status, temperatures, trees


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Compare every token with plain decoding's.")
    add_head_options(parser)
    add = parser.add_argument
    add("--tree", dest="trees", type=trees, default="chain:5,tree:5x8x32", help="drafts, separated by commas")
    add("--temperature", dest="temperatures", type=temperatures, default="0,1", help="separated by commas")
    add("--batch-size", dest="batch_sizes", type=counts, default="1,8", help="separated by commas")
    add_prompt_options(parser, num_prompts=100, max_prompt_tokens=512, max_new_tokens=128)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.commands.audit_run import audit

    return audit(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
