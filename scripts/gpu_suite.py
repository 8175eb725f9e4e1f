"""Everything that only a GPU can show, in under ten minutes, in one record: checks, kernels, identity, the roofline.

    python scripts/gpu_suite.py [--head runs/quickstart/head] [--out eval/results/DEVICE-DATE.json]

Needs torch, triton and transformers, and no network. Each group of parts runs in a process of its own; whatever fails
is written down beside what did not. Exit status: 0; 1 where a part failed; 2 with one line where there is no GPU.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path.insert(0, str(SCRIPT.parents[1]))

from eval.command import Parser, exit_status  # noqa: E402
from scripts.model_shapes import SHAPES  # noqa: E402


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Checks and measurements that need a GPU, in one record.")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of the quickstart's target")
    parser.add_argument(
        "--shape", default="llama-3.1-8b", choices=sorted(SHAPES), help="whose shape the target is grown to"
    )
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--groups", nargs="+", help="some of checks, grown, identity, kernels, library; else all")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.gpu.suite import suite_command

    return suite_command(options, SCRIPT)


if __name__ == "__main__":
    sys.exit(exit_status(main))
