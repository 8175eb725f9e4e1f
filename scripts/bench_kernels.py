"""Every kernel at a big model's shape: bytes, the time they take at the measured bandwidth, its own, and the ratio.

python scripts/bench_kernels.py --shape llama-3.1-8b --rows 1 8 32 --length 2048
"""

import argparse
import sys
from collections.abc import Sequence

from eval.command import Parser, count, exit_status
from scripts.model_shapes import SHAPES


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Kernels beside their floors.")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=count, nargs="+", help="of a step; 1 8 16 32 64 by default")
    parser.add_argument("--length", type=count, default=2048, help="tokens in the cache")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.gpu.floors import show_floors

    return show_floors(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
