"""Attention over packed rows of documents: what a row may see, and FlexAttention on a GPU.

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
"""Most shapes that FlexAttention is compiled for."""


def document_starts(documents: Tensor) -> Tensor:
    """(B, T) int64: the first slot of each slot's document, documents (B, T)."""
    slot = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(begins, slot, 0).cummax(1).values


def packed_visible(documents: Tensor) -> Tensor:
    """(B, T, T) bool: attention that is causal and stays inside each document of a packed row, documents (B, T)."""
    T = documents.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=documents.device).tril()
    return causal & (documents[:, :, None] == documents[:, None, :])


def packed_mask(documents: Tensor, window: int | None = None) -> BlockMask:
    """Return the same as FlexAttention's mask, and no key `window` slots or more before a row. Each document lies in
    one piece, at consecutive positions."""
    T, device = documents.shape[1], documents.device
    slot = torch.arange(T, dtype=torch.int64, device=device)
    least = document_starts(documents)  # (B, T) the first slot that each row sees
    if window is not None:
        least = torch.maximum(least, slot - window + 1)

    def visible(b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
        return (key <= q) & (key >= least[b, q])  # a tensor for all windows: a number would be compiled in

    first = least[:, ::TILE] // TILE  # (B, tiles) the first tile of keys: it never falls from row to row
    tile = torch.arange(first.shape[1], dtype=torch.int64, device=device)
    shown = ((tile >= first[..., None]) & (tile <= tile[:, None]))[:, None]  # (B, 1, tiles, key tiles)
    order = shown.int().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        shown.sum(-1).int(), order.int(), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(T, T)
    )


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Return FlexAttention as the kernels that it is compiled into, for each shape its own. Beyond dynamo's limit it
    would make all scores, without a word; 8 are too few for training, measurements and a target of several windows."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    return torch.compile(flex_attention, dynamic=False)
