"""Run all checks and measurements that need a GPU: three commands of under ten minutes each, with one record.

    python scripts/gpu_suite.py checks  --out gpu.json    # tests/gpu, and outputs compared with plain decoding
    python scripts/gpu_suite.py rounds  --out gpu.json    # rounds at a big model's shape
    python scripts/gpu_suite.py kernels --out gpu.json    # kernels compared with their floors

Needs torch, triton, transformers and pytest (also pytest-xdist, or the checks take long), and no network. Each group of
parts runs in its own process and writes its results into the record as they come, failures included. Exit status: 0;
1 if a part failed; 2, with one line, if there is no GPU.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path.insert(0, str(SCRIPT.parents[1]))

from eval.command import Parser, exit_status  # noqa: E402
from scripts.grown.shapes import SHAPES  # noqa: E402

COMMANDS = {
    "checks": ("checks", "identity"),
    "rounds": ("compiled", "rounds"),
    "kernels": ("compiled", "kernels"),
}
"""Groups of each command, in order. `compiled` compiles the kernels ahead of time, in parallel processes."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Checks and measurements that need a GPU, in one record.")
    groups = sorted({group for names in COMMANDS.values() for group in names})
    parser.add_argument("command", choices=[*COMMANDS, *(group for group in groups if group not in COMMANDS)])
    parser.add_argument("--out", type=Path, required=True, help="the record, to which every command adds")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of the quickstart's target")
    parser.add_argument(
        "--shape", default="llama-3.1-8b", choices=sorted(SHAPES), help="whose shape the target is grown to"
    )
    parser.add_argument("--group", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from scripts.gpu.suite import suite_command

    return suite_command(options, SCRIPT, COMMANDS.get(options.command, (options.command,)))


if __name__ == "__main__":
    sys.exit(exit_status(main))
