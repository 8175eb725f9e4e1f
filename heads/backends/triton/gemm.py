"""Products of a few rows with a large weight, for which general libraries have no good tile.

With M up to 64 rows, the time of a product is that of reading its weight. So the weight is the first operand, in tiles
of its rows and columns, and the few tokens are the second: tokens need no padding to a tile of 64. If the weight has
too few rows to give every processor a tile, its columns are cut into a fixed number of parts, whose sums are added in
order. So a row's result depends neither on the other rows nor on M. `heads.backends.triton.products` measures which
tile streams a weight fastest. Each tile rounds differently.

Letters: M rows, K columns of the weight, N rows of the weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl, triton


@dataclass(frozen=True)
class Tile:
    """Sizes of a weight's tile in a program."""

    outs: int
    depth: int
    stages: int
    """Pipeline stages: the number of tiles being loaded at once."""
    least: int = 1
    """Smallest number of rows M for which the tile is tried. A taller tile reads the tokens fewer times."""

    def __str__(self) -> str:
        return f"kernel {self.outs}x{self.depth}"


TILES = (Tile(64, 128, 4), Tile(32, 256, 4), Tile(128, 64, 4, least=32))
"""Tiles to measure. They are few, since each is compiled for every weight shape."""
MOST_ROWS = 64
PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200. Columns are cut into parts until there are as many programs."""


def parts_of(N: int, K: int, tile: Tile) -> int:
    """Return the number of parts of the columns, which depends only on the shapes of the weight and the tile."""
    parts = 1
    while parts < 16 and parts * -(-N // tile.outs) < PROCESSORS and K // (2 * parts) >= 4 * tile.depth:
        parts *= 2
    return parts


def skinny_mm(x: Tensor, weight: Tensor, tile: Tile = TILES[0]) -> Tensor:
    """Return x @ weight.T (M, N) for x (M, K) and weight (N, K), in x's dtype, summed in float32, MOST_ROWS rows at a
    time."""
    made = [add_parts(skinny_parts(part, weight, tile), x.dtype) for part in x.split(MOST_ROWS)]
    return made[0] if len(made) == 1 else torch.cat(made)


def skinny_parts(x: Tensor, weight: Tensor, tile: Tile, *, gated: bool = False) -> Tensor:
    """Same as `skinny_mm` for at most MOST_ROWS rows. If there are several parts, return them (P, M, N) in float32, for
    a kernel that adds them, first to last, while it reads them (`add_parts`).

    gated: the weight's rows are the gates, then the ups. A result in one part becomes SiLU(gate) * up (M, N / 2)."""
    (M, K), N = x.shape, len(weight)
    parts, depth = parts_of(N, K, tile), tile.depth if x.element_size() < 4 else 32  # float32 needs more registers
    gated = gated and parts == 1
    sums = x.new_empty(parts, M, N, dtype=torch.float32) if parts > 1 else x.new_empty(M, N // 2 if gated else N)
    _skinny[(triton.cdiv(N, tile.outs), parts)](
        x, weight, sums, M, N, K, x.stride(0), weight.stride(0), PART=triton.cdiv(K, parts * depth) * depth,
        TOKENS=max(16, next_power_of_2(M)), OUTS=tile.outs, DEPTH=depth, GATED=gated,
        num_warps=4, num_stages=tile.stages,
    )  # fmt: skip
    return sums


def add_parts(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum (M, N) of parts (P, M, N) float32. A tensor without parts is returned unchanged."""
    if sums.dim() == 2:
        return sums
    P, M, N = sums.shape
    out = sums.new_empty(M, N, dtype=dtype)
    _add_parts[(M, triton.cdiv(N, 1024))](sums, out, M, N, PARTS=P, BLOCK=1024)
    return out


@jit
def _skinny(  # type: ignore[no-untyped-def]
    X, WEIGHT, SUMS, M, N, K, x_m, w_n,
    PART: constexpr, TOKENS: constexpr, OUTS: constexpr, DEPTH: constexpr, GATED: constexpr,
):  # fmt: skip
    """Multiply OUTS rows of the weight in one part of its columns. With GATED, half of the rows are gates, half their
    ups."""
    i, part = tl.arange(0, OUTS), tl.program_id(1)
    if GATED:
        half: constexpr = OUTS // 2
        out = tl.program_id(0).to(tl.int64) * half + i % half
        real, n = out < N // 2, out + i // half * (N // 2)
    else:
        n = tl.program_id(0).to(tl.int64) * OUTS + i
        real = n < N
    m, depth = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    total = tl.zeros([OUTS, TOKENS], tl.float32)
    for start in range(0, PART, DEPTH):
        k = part * PART + start + depth
        w = tl.load(WEIGHT + n[:, None] * w_n + k[None], mask=real[:, None] & (k < K)[None], other=0.0)
        x = tl.load(X + m[None] * x_m + k[:, None], mask=(m < M)[None] & (k < K)[:, None], other=0.0)
        total += tl.dot(w, x, input_precision="ieee")
    if GATED:
        rounded = total.to(SUMS.dtype.element_ty).to(tl.float32)  # as a separate product would round
        gate, up = tl.split(tl.permute(tl.reshape(rounded, [2, half, TOKENS]), [1, 2, 0]))
        n = tl.program_id(0).to(tl.int64) * half + tl.arange(0, half)
        at, inside = SUMS + m[None] * (N // 2) + n[:, None], (n < N // 2)[:, None] & (m < M)[None]
        tl.store(at, silu_of(gate, up).to(SUMS.dtype.element_ty), mask=inside)
    else:
        at = SUMS + (part * M + m[None]) * N + n[:, None]
        tl.store(at, total.to(SUMS.dtype.element_ty), mask=real[:, None] & (m < M)[None])


@jit
def silu_of(gate, up):  # type: ignore[no-untyped-def]
    """Return SiLU(gate) * up in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@jit
def _add_parts(SUMS, OUT, M, N, PARTS: constexpr, BLOCK: constexpr):  # type: ignore[no-untyped-def]
    """Add the parts of one block of one row, first to last."""
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(0, PARTS):
        total += tl.load(SUMS + (part * M + m) * N + n, mask=n < N, other=0.0)
    tl.store(OUT + m * N + n, total.to(OUT.dtype.element_ty), mask=n < N)
