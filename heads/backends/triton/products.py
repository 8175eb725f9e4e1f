"""Choice between the library and our kernel for a few rows, for each matrix product of a step.

The library is chosen if it is at least as fast and its rows are independent: each row is summed in the same order
whatever the other rows are. Only then is a chain node's result bit-identical to plain decoding with a step of as many
rows (`EngineOptions.pinned`). The choice for a shape is made once, and stored in the user's cache by device, shape,
rows and versions, so that all engines, ranks and later runs agree.

Letters: M rows, K inputs, N outputs of a product.
"""

import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.functional import linear

from heads.backends.triton.availability import runs_kernels, triton
from heads.backends.triton.gemm import MOST_ROWS, TILES, Tile, skinny_mm, skinny_parts
from heads.backends.triton.layers import silu_mul
from heads.backends.triton.timing import device_seconds
from heads.errors import first_line, warn_once

logger = logging.getLogger("draftsmith")

Shape = tuple[int, int, torch.dtype]
"""Shape of a weight: N, K, dtype."""
COLD = 1 << 28
"""Bytes of weights to cycle through: several times the size of a GPU's cache."""
MOST_COPIES = 64
"""Copies are added only up to this number of weights. It limits only small weights, which matter little."""
_chosen: dict[tuple[int, Shape, torch.device], str] = {}


BY_NAME = {str(tile): tile for tile in TILES}
MAKERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "library": linear,
    **{name: partial(skinny_mm, tile=tile) for name, tile in BY_NAME.items()},
}


class Products:
    """Products of steps with certain numbers of rows. Other steps (prompts) use the library."""

    def __init__(self, makers: dict[int, dict[Shape, str]]) -> None:
        """`makers` maps M and a weight's shape to a key of MAKERS; missing entries mean the library."""
        self.makers = makers

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product (M, N) of x (M, K) and weight (N, K), plus bias (N,) if given."""
        maker = self.makers.get(len(x), {}).get(shape_of(weight), "library")
        if maker == "library":
            return linear(x, weight, bias)
        y = MAKERS[maker](x, weight)
        return y if bias is None else y.add_(bias)

    def parts(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product (M, N), or its `heads.backends.triton.gemm.skinny_parts` for a kernel that adds parts."""
        tile = self.tile(x, weight)
        return self(x, weight, bias) if tile is None or bias is not None else skinny_parts(x, weight, tile)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return SiLU(gate) * up (M, I) of x (M, K) and weight (2 I, K), the gates, then the ups; in one kernel if
        possible."""
        tile = self.tile(x, weight)
        if tile is None or bias is not None:
            return silu_mul(self(x, weight, bias))
        made = skinny_parts(x, weight, tile, gated=True)
        return made if made.dim() == 2 else silu_mul(made, x.dtype)

    def tile(self, x: Tensor, weight: Tensor) -> Tile | None:
        """Return the kernel's tile, None if the library computes the product or x has more than MOST_ROWS rows."""
        tile = BY_NAME.get(self.makers.get(len(x), {}).get(shape_of(weight), "library"))
        return tile if len(x) <= MOST_ROWS else None


def shape_of(weight: Tensor) -> Shape:
    """Return the shape of a weight (N, K)."""
    return weight.shape[0], weight.shape[1], weight.dtype


def choose_products(weights: Sequence[Tensor], rows: Collection[int]) -> Products:
    """Choose products by timing every shape among the weights (N, K) on the device, for steps of each number of `rows`.

    Timing cycles through a shape's weights, so that it measures reading them from memory, not from a cache.
    """
    by_shape: dict[Shape, list[Tensor]] = {}
    for weight in weights:
        by_shape.setdefault(shape_of(weight), []).append(weight)
    makers: dict[int, dict[Shape, str]] = {M: {} for M in rows}
    for M in rows:
        for shape, own in by_shape.items():
            known = M, shape, own[0].device
            if known not in _chosen:
                _chosen[known] = kept_choice(choice_file(own[0], M), partial(choose_maker, own, M))
            if _chosen[known] != "library":
                makers[M][shape] = _chosen[known]
    return Products(makers)


def choice_file(weight: Tensor, rows: int) -> Path | None:
    """Return the file that stores the choice for a weight's shape on its device with the current versions; None if
    kernels cannot run, so that there is no choice."""
    if not (weight.is_cuda and runs_kernels(weight)):
        return None
    device = torch.cuda.get_device_properties(weight.device)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith" / "products"
    versions = f"{device.name} {device.multi_processor_count}", f"{torch.__version__} {triton.__version__}"
    folders = [re.sub(r"[^\w.+]+", "-", name) for name in (*versions, " ".join(MAKERS))]
    N, K, dtype = shape_of(weight)
    return cache.joinpath(*folders, f"{rows}-{N}-{K}-{str(dtype).removeprefix('torch.')}")


def kept_choice(path: Path | None, choose: Callable[[], str]) -> str:
    """Return the file's choice, or make a new one and write it. If several processes choose at once, the first to write
    decides for all."""
    if path is None:
        return "library"
    if not path.is_file():
        made = choose()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=path.parent) as scratch:
                whole = Path(scratch) / path.name
                whole.write_text(made, encoding="ascii")
                os.link(whole, path)
        except FileExistsError:
            pass
        except OSError as error:
            warn_once(f"{path.parent}: choices of kernels cannot be kept there, other processes may choose others: "
                      f"{first_line(error)}")  # fmt: skip
            return made
    found = path.read_text(encoding="ascii")
    return found if found in MAKERS else choose()


def choose_maker(weights: Sequence[Tensor], rows: int) -> str:
    """Return the key of the fastest of MAKERS with independent rows for weights (N, K) of one shape, on a GPU."""
    weight = weights[0]
    made_for = [name for name in MAKERS if name not in BY_NAME or rows >= BY_NAME[name].least]
    sound = [name for name in made_for if rows_are_independent(MAKERS[name], weight, rows)]
    if not sound:
        N, K = weight.shape
        logger.warning("products of %d rows with a weight of %d x %d depend on the other rows: near-ties may turn "
                       "another way than in plain decoding", rows, N, K)  # fmt: skip
        return "library"
    return min(sound, key=lambda name: product_seconds(MAKERS[name], weights, rows))


def rows_are_independent(multiply: Callable[[Tensor, Tensor], Tensor], weight: Tensor, rows: int) -> bool:
    """Return True if a row's product is bit-identical at every row index and with any other rows."""
    draw = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(rows, weight.shape[1], generator=draw).to(weight)
    made = multiply(x, weight)
    for _ in range(2):
        order = torch.randperm(rows, generator=draw).to(x.device)
        if not torch.equal(multiply(x[order], weight), made[order]):
            return False
    alone = torch.zeros_like(x)
    alone[rows // 2] = x[rows // 2]
    return torch.equal(multiply(alone, weight)[rows // 2], made[rows // 2])


def product_seconds(multiply: Callable[[Tensor, Tensor], Tensor], weights: Sequence[Tensor], rows: int) -> float:
    """Return the seconds per product, cycling through the weights. If they are too few, as in a draft, copies are
    added."""
    enough = min(COLD // (weights[0].numel() * weights[0].element_size()), MOST_COPIES)
    in_turn = [*weights, *(weights[0].clone() for _ in range(enough - len(weights)))]
    x = torch.randn(rows, weights[0].shape[1], device=weights[0].device).to(weights[0].dtype)
    return device_seconds(lambda: [multiply(x, weight) for weight in in_turn], x.device) / len(in_turn)
