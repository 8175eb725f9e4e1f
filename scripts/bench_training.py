"""Time and memory of one EAGLE-3 training step: ours, ours with recomputation, and a plain one that keeps all logits.

    python scripts/bench_training.py                 # D 256, V 32,000, Vd 8,192, T 512, 7 steps, float32, AdamW
    python scripts/bench_training.py --device cuda

All variants run the same head on the same random features: forward, backward and AdamW, with all labels and with half
of them. The plain step follows the formula: it computes the target's logits for every token and its distribution over
the draft vocabulary, and keeps the draft's logits of every step for the backward pass. Each variant runs in its own
process, several times, in turn with the other variants. The median step counts. Memory is the peak above what is
allocated before the step (weights, features, optimizer state). The losses must agree.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.measure.command import Parser, count, exit_status

VARIANTS = ("plain", "ours", "recomputed")
LABELS = ("all", "half")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Time and memory of a training step, against whole logits.")
    add: Any = parser.add_argument
    add("--tokens", type=count, default=512, help="T, of one packed row")
    add("--steps", type=count, default=7, help="of the training-time test")
    add("--hidden", type=count, default=256)
    add("--vocab", type=count, default=32_000)
    add("--draft-vocab", type=count, default=8192)
    add("--repeats", type=count, default=3, help="processes of each variant, in turn")
    add("--updates", type=count, default=5, help="steps timed in each process, after one that is not")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--out", type=Path, help="a JSON file for the record")
    add("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    add("--labels", choices=LABELS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.measure.training_step import compare, measure

    return measure(options) if options.variant else compare(options, VARIANTS, LABELS)


if __name__ == "__main__":
    sys.exit(exit_status(main))
