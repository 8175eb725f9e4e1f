"""A table of every kernel at a big model's shape beside its floor, and of a draft's parts."""

import argparse

import torch

from eval.benchmark.roofline import Part, copy_bandwidth
from eval.gpu.drafts import draft_parts
from eval.gpu.kernels import ROWS, kernel_parts
from heads.errors import UserError
from scripts.model_shapes import SHAPES


def show_floors(options: argparse.Namespace) -> int:
    """Time and print them. UserError where there is no GPU."""
    if not torch.cuda.is_available():
        raise UserError("no GPU is at hand: the kernels run on one; take a machine that has one")
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}: copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    shape = SHAPES[options.shape]
    for rows in options.rows or ROWS:
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
