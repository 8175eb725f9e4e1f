"""Every kernel at a big model's shape: bytes, the time they take at the measured bandwidth, its own, and the ratio.

python scripts/bench_kernels.py --shape llama-3.1-8b --rows 1 8 32 --length 2048
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from eval.command import Parser, count, exit_status
from eval.gpu.drafts import draft_parts
from eval.gpu.kernels import ROWS, kernel_parts
from eval.grown import SHAPES
from eval.roofline import Part, copy_bandwidth
from heads.errors import UserError


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Kernels beside their floors.")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=count, nargs="+", default=list(ROWS))
    parser.add_argument("--length", type=count, default=2048, help="tokens in the cache")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    if not torch.cuda.is_available():
        raise UserError("no GPU is at hand: the kernels run on one; take a machine that has one")
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}: copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    shape = SHAPES[options.shape]
    for rows in options.rows:
        show(kernel_parts(shape, rows, options.length, device), bandwidth)
    show(draft_parts(shape, options.length, device), bandwidth)
    return 0


def show(parts: list[Part], bandwidth: float) -> None:
    """A line for each."""
    for part in parts:
        made = part.record(bandwidth)
        print(
            f"{made['part']:40} {made['bytes'] / 1e6:9.2f} MB  floor {made['floor_us']:8.1f} us  "
            f"{made['us']:8.1f} us  {made['over_floor']:7.2f}"
        )


if __name__ == "__main__":
    sys.exit(exit_status(main))
