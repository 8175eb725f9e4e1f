"""Attention over packed rows of documents: masks, and compiled FlexAttention.

Letters: B batch, T tokens.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128
"""Number of queries, and of keys, in a tile of FlexAttention."""
SHAPES = 64
"""Maximum number of shapes for which FlexAttention is compiled."""


def document_starts(documents: Tensor) -> Tensor:
    """Return (B, T) int64, the first slot of each slot's document, given documents (B, T)."""
    slot = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(begins, slot, 0).cummax(1).values


def packed_visible(documents: Tensor) -> Tensor:
    """Return (B, T, T) bool for attention that is causal and stays inside each document, given documents (B, T)."""
    T = documents.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=documents.device).tril()
    return causal & (documents[:, :, None] == documents[:, None, :])


def packed_mask(documents: Tensor, window: int | None = None) -> BlockMask:
    """Return `packed_visible` as a FlexAttention mask, without keys that are `window` slots or more before the query.
    Each document must be contiguous, with consecutive positions."""
    T, device = documents.shape[1], documents.device
    slot = torch.arange(T, dtype=torch.int64, device=device)
    least = document_starts(documents)  # (B, T) the first slot that each query sees
    if window is not None:
        least = torch.maximum(least, slot - window + 1)

    def visible(b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
        return (key <= q) & (key >= least[b, q])  # a tensor works for all windows; a number would be compiled in

    first = least[:, ::TILE] // TILE  # (B, tiles) the first tile of keys, since `least` never decreases
    tile = torch.arange(first.shape[1], dtype=torch.int64, device=device)
    shown = ((tile >= first[..., None]) & (tile <= tile[:, None]))[:, None]  # (B, 1, tiles, key tiles)
    order = shown.int().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        shown.sum(-1).int(), order.int(), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(T, T)
    )


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Return compiled FlexAttention, with separate kernels for each shape. Beyond dynamo's recompile limit, it would
    silently compute all scores. The default limit of 8 is too small for training, evaluation and several windows."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    return torch.compile(flex_attention, dynamic=False)
