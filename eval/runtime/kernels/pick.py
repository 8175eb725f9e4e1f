"""A row's likeliest columns and their log-probabilities: of a draft's logits, in two kernels instead of some twenty.

A program takes BLOCK columns of one row and keeps the best few of them, beside the block's share of the softmax; a
second pass compares the blocks' best. Among equal logits the lowest column stands first.

Letters: M rows, V columns, R columns picked.
"""

import torch
from torch import Tensor

from heads.kernels.backend import constexpr, jit, next_power_of_2, runs_kernels, tl, triton

BLOCK = 4096


def best_of_rows(logits: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits (M, V) -> the `count` (R) best columns (M, R) int64, falling, and their log-softmax (M, R) float32.
    token_ids (V,) int64: what columns are called, their numbers if None."""
    if not runs_kernels(logits):
        return best_of_rows_twin(logits, count, token_ids)
    logits = logits.contiguous()
    M, V = logits.shape
    blocks = triton.cdiv(V, BLOCK)
    tops = logits.new_empty(2, M, blocks, dtype=torch.float32)
    values = logits.new_empty(M, blocks, count, dtype=torch.float32)
    ids = logits.new_empty(M, blocks, count, dtype=torch.int64)
    columns, logp = logits.new_empty(M, count, dtype=torch.int64), logits.new_empty(M, count, dtype=torch.float32)
    _best_of_block[(M, blocks)](logits, tops[0], tops[1], values, ids, V, blocks, COUNT=count, BLOCK=BLOCK)
    _best_of_blocks[(M,)](
        tops[0], tops[1], values, ids, ids if token_ids is None else token_ids, columns, logp, V, blocks,
        COUNT=count, PAD=next_power_of_2(blocks), ALL=next_power_of_2(blocks * count), NAMED=token_ids is not None,
    )  # fmt: skip
    return columns, logp


def best_of_rows_twin(logits: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same in torch operations; which of equal logits stands first is not said."""
    law = logits.float().log_softmax(-1)
    logp, columns = law.max(-1, keepdim=True) if count == 1 else law.topk(count, dim=-1)
    return columns if token_ids is None else token_ids[columns], logp


@jit
def _best_of_block(  # type: ignore[no-untyped-def]
    LOGITS, TOPS, MASSES, VALUES, IDS, V, blocks, COUNT: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGITS + row * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)
    at = row * blocks + block
    tl.store(TOPS + at, top)
    tl.store(MASSES + at, tl.sum(tl.where(v < V, tl.exp(x - top), 0.0), 0))
    left = v < V
    for r in range(0, COUNT):
        best = tl.max(tl.where(left, x, -float("inf")), 0)
        first = tl.min(tl.where(left & (x == best), v, V), 0)  # V where no column is left
        tl.store(VALUES + at * COUNT + r, best)
        tl.store(IDS + at * COUNT + r, first.to(tl.int64))
        left = left & (v != first)


@jit
def _best_of_blocks(  # type: ignore[no-untyped-def]
    TOPS, MASSES, VALUES, IDS, NAMES, COLUMNS, LOGP, V, blocks,
    COUNT: constexpr, PAD: constexpr, ALL: constexpr, NAMED: constexpr,
):  # fmt: skip
    """One row: the blocks' best against each other."""
    row, block, j = tl.program_id(0).to(tl.int64), tl.arange(0, PAD), tl.arange(0, ALL)
    tops = tl.load(TOPS + row * blocks + block, mask=block < blocks, other=-float("inf"))
    masses = tl.load(MASSES + row * blocks + block, mask=block < blocks, other=0.0)
    top = tl.max(tops, 0)
    whole = top + tl.log(tl.sum(masses * tl.exp(tops - top), 0))
    kept = j < blocks * COUNT
    values = tl.load(VALUES + row * blocks * COUNT + j, mask=kept, other=-float("inf"))
    ids = tl.load(IDS + row * blocks * COUNT + j, mask=kept, other=V)
    left = ids < V
    for r in range(0, COUNT):
        best = tl.max(tl.where(left, values, -float("inf")), 0)
        first = tl.min(tl.where(left & (values == best), ids, V), 0)
        tl.store(COLUMNS + row * COUNT + r, tl.load(NAMES + first, mask=first < V, other=0) if NAMED else first)
        tl.store(LOGP + row * COUNT + r, best - whole)
        left = left & (ids != first)
