"""Time every kernel at a big model's shape, and compare it with the time to move its bytes at the measured bandwidth.

    python scripts/bench_kernels.py --shape llama-3.1-8b --rows 1 8 32 --length 2048

Prints for each kernel its bytes, its floor (the time for the bytes alone), its own time, and the ratio. Needs a GPU.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.command import Parser, count, exit_status
from scripts.grown.shapes import SHAPES


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Kernels beside their floors.")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 8, 16, 32, 64], help="of a step")
    parser.add_argument("--length", type=count, default=2048, help="tokens in the cache")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import torch

    from eval.benchmark.roofline import copy_bandwidth
    from heads.backends.triton.timing import device_seconds
    from heads.errors import UserError
    from scripts.gpu.draft_steps import draft_parts
    from scripts.gpu.kernels import kernel_parts

    if not torch.cuda.is_available():
        raise UserError("no GPU is at hand: the kernels run on one; take a machine that has one")
    device, shape = torch.device("cuda"), SHAPES[options.shape]
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}: copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    parts = [
        part for rows in options.rows for part in kernel_parts(shape, rows, options.length, device, device_seconds)
    ]
    for part in [*parts, *draft_parts(shape, options.length, device, device_seconds)]:
        made = part.record(bandwidth)
        print(
            f"{made['part']:40} {made['bytes'] / 1e6:9.2f} MB  floor {made['floor_us']:8.1f} us  "
            f"{made['us']:8.1f} us  {made['over_floor']:7.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
