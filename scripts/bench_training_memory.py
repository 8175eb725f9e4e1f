"""Peak memory of one EAGLE-3 training step: our loss against one that keeps whole logits.

    python scripts/bench_training_memory.py                   # T = 2,048, 7 steps, 32k draft vocabulary
    python scripts/bench_training_memory.py --device cuda

Both run the same head on the same random features, forward, backward and AdamW, each in a process of its own. The plain
one does what the formula says: the target's logits for every token, its distribution over the draft vocabulary, and the
draft's logits of every step kept for the backward pass. Their losses must agree; what is compared is the peak above the
memory that stands before the step (weights, features, optimizer state), and that of the whole process.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.command import Parser, count, exit_status

VARIANTS = ("plain", "ours")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Peak memory of a training step, against whole logits.")
    add: Any = parser.add_argument
    add("--tokens", type=count, default=2048, help="T, of one packed row")
    add("--steps", type=count, default=7, help="of the training-time test")
    add("--hidden", type=count, default=512)
    add("--vocab", type=count, default=128_256)
    add("--draft-vocab", type=count, default=32_000)
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--out", type=Path, help="a JSON file for the record")
    add("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.benchmark.training_memory import compare, measure

    return measure(options) if options.variant else compare(options, VARIANTS)


if __name__ == "__main__":
    sys.exit(exit_status(main))
