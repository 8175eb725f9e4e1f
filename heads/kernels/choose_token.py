"""Choice of tokens directly from the output head's tiles, as a Triton kernel. The (M, V) logits are never written.

    choice_m = argmax_v(h_m . w_v / T + G(seed, position, v))        lowest id on ties; no noise at T = 0

A NaN score counts as the highest, as in torch, so that every choice is an id of the vocabulary.

A program computes one tile of logits in float32 for up to ROWS rows, adds the noise of
`heads.kernels.gumbel.gumbel` and keeps the tile's best. A second pass compares the tiles in order. Filters
(top-k, top-p, min-p) need the whole distribution, and penalties change it: both use logits. log p and logits / T differ
by a constant, so they have the same choices.

Letters: B rows of the batch, M hidden states, equally many per row, D width, V vocabulary.
"""

import torch
from torch import Tensor

from heads.kernels.triton_support import constexpr, jit, next_power_of_2, tl, triton

TILE = 64
"""Ids per tile. A program streams weight tiles of TILE x DEPTH."""
DEPTH = 64
ROWS = 64
"""Maximum number of hidden states per program. More would not fit its registers."""


def choose_in_tiles(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    noisy: bool,
    tile: int = 0,
) -> Tensor:
    """Return the chosen ids (M,) int64: hidden (M, D), weight (V, D), temperature (B,) float32, seeds (B,) and
    positions (M,) int64.

    M holds the batch's rows in order. `noisy` is True if any row has a temperature above 0. `tile`: rows that a program
    allocates, if more than M; steps whose results are compared need the same value. Scaled or soft-capped logits are
    not supported.
    """
    (M, D), V = hidden.shape, len(weight)
    tiles = triton.cdiv(V, TILE)
    rows = rows_of(M, tile)
    best = hidden.new_empty(tiles, M, dtype=torch.float32)
    ids = hidden.new_empty(tiles, M, dtype=torch.int64)
    out = hidden.new_empty(M, dtype=torch.int64)
    _best_of_tile[(triton.cdiv(M, rows), tiles)](
        hidden, weight, temperature, seeds, positions.contiguous(), best, ids, M, V, M // len(seeds),
        hidden.stride(0), weight.stride(0),
        D=D, DEPTH=min(DEPTH, max(16, next_power_of_2(D))), TILE=TILE, ROWS=rows, NOISY=noisy, WRITE=False,
    )  # fmt: skip
    _best_of_tiles[(M,)](best, ids, out, M, tiles, PAD=next_power_of_2(tiles))
    return out


def rows_of(M: int, tile: int) -> int:
    return min(ROWS, max(16, next_power_of_2(max(M, tile))))


def logits_in_tiles(hidden: Tensor, weight: Tensor, tile: int = 0) -> Tensor:
    """Return the logits (M, V) in float32, for rows that need the whole distribution: the same numbers that
    `choose_in_tiles` compares."""
    (M, D), V = hidden.shape, len(weight)
    out = hidden.new_empty(M, V, dtype=torch.float32)
    rows = rows_of(M, tile)
    _best_of_tile[(triton.cdiv(M, rows), triton.cdiv(V, TILE))](
        hidden, weight, out, out, out, out, out, M, V, 1, hidden.stride(0), weight.stride(0),
        D=D, DEPTH=min(DEPTH, max(16, next_power_of_2(D))), TILE=TILE, ROWS=rows, NOISY=False, WRITE=True,
    )  # fmt: skip
    return out


@jit
def _best_of_tile(  # type: ignore[no-untyped-def]
    HIDDEN, WEIGHT, TEMPERATURE, SEEDS, POSITIONS, BEST, IDS, M, V, each, h_m, w_v,
    D: constexpr, DEPTH: constexpr, TILE: constexpr, ROWS: constexpr, NOISY: constexpr, WRITE: constexpr,
):  # fmt: skip
    """Compute the best score and id of one tile of the vocabulary for ROWS rows; with WRITE, write the tile's logits to
    BEST instead.

    All rows' programs of one tile run at the same time, so that its weights are read from memory once.
    """
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    v = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    live = m < M
    real = v < V
    logits = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, D, DEPTH):
        d = start + tl.arange(0, DEPTH)
        x = tl.load(HIDDEN + m[:, None] * h_m + d[None], mask=live[:, None] & (d < D)[None], other=0.0)
        w = tl.load(WEIGHT + v[None] * w_v + d[:, None], mask=real[None] & (d < D)[:, None], other=0.0)
        logits += tl.dot(x, w, input_precision="ieee")
    if WRITE:
        tl.store(BEST + m[:, None].to(tl.int64) * V + v[None], logits, mask=live[:, None] & real[None])
        return
    if NOISY:
        temperature = tl.load(TEMPERATURE + m // each, mask=live, other=0.0)
        seed = tl.load(SEEDS + m // each, mask=live, other=0)
        position = tl.load(POSITIONS + m, mask=live, other=0)
        hot = temperature > 0
        warm = logits / tl.where(hot, temperature, 1.0)[:, None] + noise_of(key_of(seed, position)[:, None], v[None])
        logits = tl.where(hot[:, None], warm, logits)
    logits = tl.where(logits == logits, logits, float("inf"))
    logits = tl.where(real[None], logits, -float("inf"))
    best = tl.max(logits, 1)
    first = tl.min(tl.where(logits == best[:, None], v[None], V), 1)
    tl.store(BEST + tile * M + m, best, mask=live)
    tl.store(IDS + tile * M + m, first.to(tl.int64), mask=live)


@jit
def _best_of_tiles(BEST, IDS, OUT, M, tiles, PAD: constexpr):  # type: ignore[no-untyped-def]
    """Find the best tile of one row, the first on ties."""
    m = tl.program_id(0)
    t = tl.arange(0, PAD)
    best = tl.load(BEST + t * M + m, mask=t < tiles, other=-float("inf"))
    ids = tl.load(IDS + t * M + m, mask=t < tiles, other=2**62)
    tl.store(OUT + m, tl.min(tl.where(best == tl.max(best, 0), ids, 2**62), 0))


@jit
def key_of(seed, position):  # type: ignore[no-untyped-def]
    """Return the key of the noise of all tokens at one position: the bits and the formula of `heads.kernels.gumbel`."""
    return _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * _golden())


@jit
def noise_of(key, token):  # type: ignore[no-untyped-def]
    """Return the Gumbel noise of a token id, float32. log(1 - w) loses precision for small w, and the factor
    w / (1 - (1 - w)) restores it (Kahan's log1p)."""
    bits = _mix(key + token.to(tl.uint64) * _golden())
    w = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    u = 1.0 - w
    log1p = tl.where(u == 1.0, -w, tl.log(u) * (w / (1.0 - u)))
    return (-tl.log(-log1p)).to(tl.float32)


@jit
def _golden():  # type: ignore[no-untyped-def]
    """splitmix64's stride, 2^64 over the golden ratio."""
    return tl.full([], 0x9E3779B97F4A7C15, tl.uint64)


@jit
def _mix(x):  # type: ignore[no-untyped-def]
    """splitmix64's finaliser on unsigned integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
