"""Gain of C on this CPU: each piece of a round with it and with torch's operations alone, in turns.

    python scripts/bench_backends.py recipes/quickstart/target
    python scripts/bench_backends.py recipes/quickstart/target --shape 0.4b      # random weights of that shape

The head is an untrained EAGLE-3 head of the quickstart's sizes: time does not depend on weights. Each form runs in a
process of its own, the second without a compiler (`CC=none`), and they take turns. What gives less than 1.3x, or a
twentieth of a round, need not be C.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.command import Parser, count, exit_status
from scripts.grown.shapes import SHAPES


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Each piece of a round in C and in torch's operations.")
    parser.add_argument("target", help="a folder or hub id")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="take random weights of that shape")
    parser.add_argument("--repeats", type=count, default=20, help="turns of each form")
    parser.add_argument("--calls", type=count, default=20, help="calls in a turn")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from scripts.backend_pieces import compare

    return compare(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
