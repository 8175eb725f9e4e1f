"""Choice of the likeliest children of a level's nodes, noise included, directly from a draft's logits: two kernels.

    score_v = logit_v / T + G(seed, position, id_v)        the logit alone at T = 0

The result is the R best columns and the log-softmax of their scores, which trees rank them by. At T = 0 the scores are
multiplied by SHARPNESS in the softmax. A program takes BLOCK columns of several nodes at one position, which share
their noise. It keeps the best columns of each node and the block's share of its softmax. A second kernel compares the
blocks' best. Equal scores rank by lowest column, and NaN scores rank last. The reference is
`heads.backends.torch.sampling.RowSampling.pick_of_each`.

Letters: B rows of the batch, W nodes, V columns, R columns picked.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.backends.torch.sampling import SHARPNESS, RowSampling
from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl, triton
from heads.backends.triton.noise import key_of, noise_of

TILE = 8192
"""Maximum number of scores in a program."""
NODES = 16
"""Maximum number of nodes in a program."""
BLOCK = 1024
"""Maximum number of columns in a program. Noise is long arithmetic, so many programs should share it."""

COMPARED = 1 << 13
"""Maximum number of the blocks' best columns that one program compares. With more, torch's operations run."""


class TritonSampling(RowSampling):
    """`RowSampling` that picks with kernels."""

    def pick_of_each(
        self, logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if triton.cdiv(logits.shape[2], TILE // NODES) * count > COMPARED:
            return super().pick_of_each(logits, positions, count, token_ids)
        noise = Noise(positions, self.temperature, self.seed) if self.random else None
        return best_columns(logits, count, token_ids, noise)


@dataclass(frozen=True)
class Noise:
    """Inputs of the noise of a level's nodes, and the temperature."""

    positions: Tensor  # (B, W) int64, of the tokens to be picked
    temperature: Tensor  # (B,) float32; at 0 there is no noise
    seeds: Tensor  # (B,) int64


def best_columns(
    logits: Tensor, count: int, token_ids: Tensor | None = None, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """Return the `count` (R) best children of each node, best first, with kernels: target ids (B, W, R) int64 and
    log-probabilities (B, W, R) float32.

    logits (B, W, V); token_ids (V,) int64 the target ids of the columns, None if they are 0 .. V - 1.
    """
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    B, W, V = logits.shape
    together = noise is None or W == 1 or noise.positions.stride(1) == 0
    nodes = min(NODES, next_power_of_2(W)) if together else 1
    block = min(BLOCK, TILE // nodes)
    blocks = triton.cdiv(V, block)
    tops = logits.new_empty(2, B * W, blocks, dtype=torch.float32)
    values = logits.new_empty(B * W, blocks, count, dtype=torch.float32)
    columns = logits.new_empty(B * W, blocks, count, dtype=torch.int32)
    ids, logp = logits.new_empty(B, W, count, dtype=torch.int64), tops.new_empty(B, W, count)
    named = ids if token_ids is None else token_ids
    positions, temperature, seeds = (ids[..., 0],) * 3 if noise is None else vars(noise).values()
    _best_of_block[(B, triton.cdiv(W, nodes), blocks)](
        logits, logits.stride(0), logits.stride(1), positions, positions.stride(0), positions.stride(1),
        temperature, seeds, named, tops[0], tops[1], values, columns, W, V, blocks,
        COUNT=count, NAMED=token_ids is not None, NOISY=noise is not None, SHARPNESS=SHARPNESS,
        NODES=nodes, BLOCK=block,
        num_warps=8 if nodes * block > 2048 else 4,
    )  # fmt: skip
    _best_of_blocks[(B * W,)](
        tops[0], tops[1], values, columns, temperature, named, ids, logp, W, V, blocks,
        COUNT=count, NAMED=token_ids is not None, NOISY=noise is not None, SHARPNESS=SHARPNESS,
        PAD=next_power_of_2(blocks), ALL=next_power_of_2(blocks * count),
        num_warps=4 if blocks * count <= 2048 else 16,
    )  # fmt: skip
    return ids, logp


@jit
def _best_of_block(  # type: ignore[no-untyped-def]
    LOGITS, l_b, l_w, POSITIONS, p_b, p_w, TEMPERATURE, SEEDS, TOKEN_IDS, TOPS, MASSES, VALUES, COLUMNS, W, V, blocks,
    COUNT: constexpr, NAMED: constexpr, NOISY: constexpr, SHARPNESS: constexpr, NODES: constexpr, BLOCK: constexpr,
):  # fmt: skip
    b, group, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    w, v = group * NODES + tl.arange(0, NODES), block * BLOCK + tl.arange(0, BLOCK)
    live, real = w < W, v < V
    at = LOGITS + b * l_b + w[:, None].to(tl.int64) * l_w + v[None]
    x = tl.load(at, mask=live[:, None] & real[None], other=-float("inf")).to(tl.float32)
    if NOISY:
        temperature = tl.load(TEMPERATURE + b)
        token = v.to(tl.int64)
        if NAMED:
            token = tl.load(TOKEN_IDS + v, mask=real, other=0)
        key = key_of(tl.load(SEEDS + b), tl.load(POSITIONS + b * p_b + group * NODES * p_w))
        warm = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0)) + noise_of(key, token)[None]
        x = tl.where(temperature > 0, warm, x)
    x = tl.where(x == x, x, -float("inf"))
    top = tl.max(x, 1)
    row = (b * W + w) * blocks + block
    tl.store(TOPS + row, top, mask=live)
    sharpness = _sharpness(TEMPERATURE + b, NOISY, SHARPNESS)
    tl.store(MASSES + row, tl.sum(tl.exp(sharpness * (x - _finite(top)[:, None])), 1), mask=live)
    best, first = tl.full([NODES], float("inf"), tl.float32), tl.full([NODES], -1, tl.int32)
    for r in range(0, COUNT):
        after = (x < best[:, None]) | ((x == best[:, None]) & (v[None] > first[:, None]))
        left = after & real[None]  # the columns that rank after those already taken
        best = tl.max(tl.where(left, x, -float("inf")), 1)
        first = tl.min(tl.where(left & (x == best[:, None]), v[None], V), 1)  # V if no column is left
        tl.store(VALUES + row * COUNT + r, best, mask=live)
        tl.store(COLUMNS + row * COUNT + r, first, mask=live)


@jit
def _best_of_blocks(  # type: ignore[no-untyped-def]
    TOPS, MASSES, VALUES, COLUMNS, TEMPERATURE, TOKEN_IDS, IDS, LOGP, W, V, blocks,
    COUNT: constexpr, NAMED: constexpr, NOISY: constexpr, SHARPNESS: constexpr, PAD: constexpr, ALL: constexpr,
):  # fmt: skip
    """Compare the blocks' best columns of one node."""
    row, block, j = tl.program_id(0).to(tl.int64), tl.arange(0, PAD), tl.arange(0, ALL)
    tops = tl.load(TOPS + row * blocks + block, mask=block < blocks, other=-float("inf"))
    masses = tl.load(MASSES + row * blocks + block, mask=block < blocks, other=0.0)
    top = _finite(tl.max(tops, 0))
    sharpness = _sharpness(TEMPERATURE + row // W, NOISY, SHARPNESS)
    mass = tl.sum(masses * tl.exp(sharpness * (tops - top)), 0)
    whole = tl.log(tl.where(mass > 0, mass, 1.0))
    kept = j < blocks * COUNT
    values = tl.load(VALUES + row * blocks * COUNT + j, mask=kept, other=-float("inf"))
    columns = tl.load(COLUMNS + row * blocks * COUNT + j, mask=kept, other=V)
    left = columns < V
    for r in range(0, COUNT):
        best = tl.max(tl.where(left, values, -float("inf")), 0)
        first = tl.min(tl.where(left & (values == best), columns, V - 1), 0)
        token = first.to(tl.int64)
        if NAMED:
            token = tl.load(TOKEN_IDS + first)
        tl.store(IDS + row * COUNT + r, token)
        tl.store(LOGP + row * COUNT + r, sharpness * (best - top) - whole)
        left = left & (columns != first)


@jit
def _sharpness(AT, NOISY: constexpr, SHARPNESS: constexpr):  # type: ignore[no-untyped-def]
    """Return the factor of the scores of a row whose temperature is at AT."""
    if NOISY:
        return tl.where(tl.load(AT) > 0, 1.0, SHARPNESS)
    else:
        return SHARPNESS


@jit
def _finite(top):  # type: ignore[no-untyped-def]
    """Return the value to subtract before exp: `top`, or 0 if all scores are -inf."""
    return tl.where(top > -float("inf"), top, 0.0)
