"""Grow a small target and its heads into the shape of a big model: the same function at the big model's cost.

    python scripts/grow_target.py recipes/quickstart/target runs/grown --shape 0.4b --heads runs/quickstart
    python eval/bench.py runs/grown/quickstart

New width, attention heads and layers are zeros (`scripts/grown/target.py`). Before anything is saved, the grown model's
logits are compared with those of the small model. Reports name such a target as grown.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from eval.command import Parser, count, exit_status
from scripts.grown.shapes import SHAPES, ModelShape


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Grow a small target, and its head, into the shape of a big model.")
    add: Any = parser.add_argument
    add("target", help="a folder or hub id of a Llama-architecture model")
    add("out", type=Path, help="folder to create")
    add("--heads", nargs="+", default=[], help="run directories of its heads, each grown into OUT/NAME")
    add("--shape", choices=sorted(SHAPES), help="shape to grow to; sizes such as --hidden-size override or replace it")
    for field in fields(ModelShape):
        add(f"--{field.name.replace('_', '-')}", type=count, help=argparse.SUPPRESS)
    add("--head-intermediate-size", type=count, help="the head's, by default the grown target's")
    add("--draft-vocab-size", type=count, help="an EAGLE-3 head's, by default its own")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="number type to store and check it in")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from scripts.grown.command import grow

    return grow(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
