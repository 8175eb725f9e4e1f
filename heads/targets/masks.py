"""Masks: who sees whom in packed rows of documents, in a sliding window, and in the form that a family's decoder takes.

Letters: B batch, T tokens, N queries, S key slots.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from heads.targets.families import RECURRENT_LAYERS

T = TypeVar("T")
TILE = 128
"""Number of queries, and of keys, in a tile of FlexAttention."""
SHAPES = 64
"""Maximum number of shapes that FlexAttention is compiled for."""


def document_starts(documents: Tensor) -> Tensor:
    """Return (B, T) int64: for each slot, the first slot of its document. documents (B, T)."""
    slot = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(begins, slot, 0).cummax(1).values


def packed_visible(documents: Tensor) -> Tensor:
    """Return a mask (B, T, T) bool: causal, and restricted to each document of a packed row. documents (B, T)."""
    T = documents.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=documents.device).tril()
    return causal & (documents[:, :, None] == documents[:, None, :])


def packed_mask(documents: Tensor, window: int | None = None, slots: Tensor | None = None) -> BlockMask:
    """Return the mask of `packed_visible` as a block mask of FlexAttention, without keys that are `window` slots or
    more before a query. Each document must be contiguous, with consecutive positions. slots (N,) int64, ascending:
    those of the queries, None: all."""
    T = documents.shape[1]
    device = documents.device
    keys = torch.arange(T, dtype=torch.int64, device=device)
    slots = keys if slots is None else slots
    least = document_starts(documents)[:, slots]  # (B, N) the first slot that each query sees
    if window is not None:
        least = torch.maximum(least, slots - window + 1)

    def visible(b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
        return (key <= slots[q]) & (key >= least[b, q])  # both are tensors, since a number would be compiled in

    first = least[:, ::TILE] // TILE  # (B, tiles) the first tile of keys: it never decreases from query to query
    last = torch.cat([slots[TILE - 1 :: TILE], slots[-1:]])[: first.shape[1]] // TILE
    tile = keys[::TILE] // TILE
    shown = ((tile >= first[..., None]) & (tile <= last[:, None]))[:, None]  # (B, 1, tiles, key tiles)
    order = shown.int().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        shown.sum(-1).int(), order.int(), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(len(slots), T)
    )


def many_shapes() -> Any:
    """Return a context, or decorator, in which FlexAttention may be compiled for SHAPES shapes. Beyond dynamo's limit
    it would silently compute all scores; the default of 8 is too low for training, measurements and a target with
    several windows."""
    return torch._dynamo.config.patch(recompile_limit=SHAPES)


@cache
def compiled_flex_attention() -> Callable[..., object]:
    """Return FlexAttention, compiled separately for each shape."""
    compiled: Callable[..., object] = many_shapes()(torch.compile(flex_attention, dynamic=False))
    return compiled


def attention_masks(
    config: object, dtype: torch.dtype, visible: Tensor, positions: Tensor, key_positions: Tensor
) -> Tensor | dict[str, Tensor | None]:
    """Return the mask in the form that the family's decoder passes to its layers unchanged. Arguments as in
    `FrozenTarget.features`."""

    def mask(window: int | None) -> Tensor:
        if window is None:
            return additive(visible, dtype)
        return additive(visible & (positions[:, :, None] - key_positions[:, None, :] < window), dtype)

    return masks_by_kind(config, mask)


def masks_by_kind(config: object, mask: Callable[[int | None], T]) -> T | dict[str, T | None]:
    """Return the mask argument of a family's decoder. `mask` makes the mask of a sliding window, or of None.

    Decoders take one mask for all layers, or a dict if they have several kinds of layers. `layer_types` lists the
    layers with the window. Without it, all layers have it.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or {"sliding_attention"})
    if kinds == {"full_attention"} or (window is None and not kinds & RECURRENT_LAYERS):
        return mask(None)
    if kinds == {"sliding_attention"}:
        return mask(window)
    # Recurrent layers need no mask: padding comes after a text.
    return {"full_attention": mask(None), "sliding_attention": mask(window), "linear_attention": None, "conv": None}


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask (B, N, S) bool to (B, 1, N, S) to be added to scores, which every attention kernel supports.

    Eager attention would add a boolean mask as 0 and 1. Masked entries are the most negative finite number, since -inf
    turns a row that sees nothing into NaN.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
