"""Save a head with its projections in 8 bits, as vLLM and SGLang serve it.

    python scripts/quantize_head.py runs/quickstart runs/quickstart-fp8 --dtype fp8

Nothing is calibrated. OUT must be new; it is written completely or not at all.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, exit_status, place
from heads.core.files import check_folder

DTYPES = ("fp8", "int8")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Save a head with its projections in 8 bits.")
    add = parser.add_argument
    add("head", type=place, help="a run's folder, or the folder or Hub id of a head")
    add("out", type=Path, help="folder to create")
    add("--dtype", choices=DTYPES, default="fp8", help="8-bit type of the weights; default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from heads.quantize import quantize_head

    check_folder(options.out, "OUT")
    before, after = quantize_head(options.head, options.out, options.dtype)
    print(f"written to {options.out}: {after / 2**20:.1f} MiB, {before / 2**20:.1f} before")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
