"""Attention of draft blocks: each row sees the context before its block's root, and the rows of its own block.

A GPU uses FlexAttention. Other devices compute neighbouring blocks in pieces, and the backward pass recomputes the
scores of each piece. Neither builds a mask of all rows and keys.

Letters: B batch, H query heads, G query heads per key head, T context tokens, N blocks, R rows of a block, d head
dimension, C blocks of a piece, E context tokens that a piece sees.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from heads.core.contract import Rows
from heads.parts.labels import supervised
from heads.targets.masks import TILE, compiled_flex_attention, document_starts

PIECE = 256
"""Number of rows in a piece."""


@dataclass(frozen=True)
class AttentionWindow:
    """Bounds of what the rows of a layer see."""

    causal: bool = False
    """True if a row does not see later rows."""
    size: int | None = None
    """Number of positions that a row sees, its own included; at least the number of rows in a block. None: all."""


@dataclass(frozen=True, eq=False)
class BlockVisibility:
    """Keys that the rows of some blocks see: slots starts .. anchors - 1 of the context, and their own block."""

    starts: Tensor  # (B, N) int64
    anchors: Tensor  # (B, N) int64, ascending
    rows: int
    """R"""
    context: int
    """T"""
    window: AttentionWindow

    @cached_property
    def first(self) -> Tensor:
        """First context slot that each row sees, at most its anchor: (B, N, R), or (B, N, 1) if all rows of a block see
        the same slots."""
        if self.window.size is None:
            return self.starts[..., None]
        row = torch.arange(self.rows, device=self.anchors.device)
        return torch.maximum(self.starts[..., None], self.anchors[..., None] + row - (self.window.size - 1))

    @cached_property
    def pieces(self) -> list[tuple[slice, int, int]]:
        """Blocks of each piece, with the first context slot that any of them sees and the end of these slots."""
        step = max(1, PIECE // self.rows)
        pieces = []
        for first in range(0, self.anchors.shape[1], step):
            blocks = slice(first, first + step)
            stop = int(self.anchors[:, blocks].max())
            pieces.append((blocks, min(int(self.first[:, blocks].min()), stop), stop))
        return pieces

    @cached_property
    def block_mask(self) -> BlockMask:
        """FlexAttention's mask over the keys [context ; blocks]. It lists the tiles that hold a visible key."""
        first = self.first
        anchors = self.anchors
        R = self.rows
        T = self.context
        causal = self.window.causal
        N = anchors.shape[1]
        device = anchors.device

        def is_visible(b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
            block = q // R
            own = key - T
            before = (key >= first[b, block, q % first.shape[2]]) & (key < anchors[b, block])
            inside = (own >= 0) & (own // R == block)
            return before | (inside & (own % R <= q % R) if causal else inside)

        row = torch.arange(0, N * R, TILE, device=device)  # first row of each tile of queries
        low, high = row // R, (row + TILE - 1).clamp_max(N * R - 1) // R  # first and last block of the tile
        span = torch.arange(N, device=device)
        in_tile = (span >= low[:, None]) & (span <= high[:, None])  # (tiles, N)
        start = first[:, None, :, 0].masked_fill(~in_tile, T).amin(2)  # (B, tiles): context slots that the tile sees
        stop = anchors[:, None].masked_fill(~in_tile, 0).amax(2)
        key = torch.arange(0, T + N * R, TILE, device=device)  # first key of each tile of keys
        before = (key < stop[..., None]) & (key + TILE > start[..., None])  # (B, tiles, key tiles)
        own = (key < T + (high + 1)[:, None] * R) & (key + TILE > T + low[:, None] * R)  # (tiles, key tiles)
        visible = (before | own)[:, None]
        order = visible.int().argsort(dim=-1, descending=True, stable=True)
        return BlockMask.from_kv_blocks(
            visible.sum(-1).int(), order.int(), BLOCK_SIZE=TILE, mask_mod=is_visible, seq_lengths=(N * R, T + N * R)
        )


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, visible: BlockVisibility
) -> Tensor:
    """Return the attention of blocks (B, H, N * R, d). q (B, H, N * R, d), k and v (B, H / G, N * R, d) are of the
    blocks, context_k and context_v (B, H / G, T, d) of the context."""
    q, k, context_k = (x.to(v.dtype) for x in (q, k, context_k))
    with torch.autocast(q.device.type, enabled=False):
        if q.is_cuda:
            return by_tiles(q, k, v, context_k, context_v, visible, compiled_flex_attention())
        return by_pieces(q, k, v, context_k, context_v, visible)


def by_pieces(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, visible: BlockVisibility
) -> Tensor:
    """Compute `block_attention` for some neighbouring blocks at a time."""
    outs = []
    for blocks, start, stop in visible.pieces:
        rows = slice(blocks.start * visible.rows, blocks.stop * visible.rows)
        slot = torch.arange(start, stop, device=q.device)
        hidden = (slot < visible.first[:, blocks, :, None]) | (slot >= visible.anchors[:, blocks, None, None])
        own = (x[:, :, rows] for x in (q, k, v))
        context = (x[:, :, start:stop] for x in (context_k, context_v))
        inputs = (*own, *context, hidden, visible.window.causal)
        outs.append(checkpoint(_piece, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outs, 2)


def _piece(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, hidden: Tensor, causal: bool
) -> Tensor:
    """Compute one piece. q (B, H, C * R, d), k and v (B, H / G, C * R, d), context (B, H / G, E, d), hidden
    (B, C, R or 1, E)."""
    (B, H, rows, d), Hkv, C, E = q.shape, k.shape[1], hidden.shape[1], hidden.shape[3]
    G = H // Hkv
    R = rows // C
    q = q.reshape(B, Hkv, -1, d) * (1 / math.sqrt(d))  # (B, H / G, G * C * R, d)
    k, v = (x.reshape(B, Hkv, 1, C, R, d) for x in (k, v))
    dtype = torch.promote_types(q.dtype, torch.float32)
    before = (q @ context_k.mT).to(dtype).view(B, Hkv, G, C, R, E)
    before = before.masked_fill(hidden[:, None, None], -torch.inf)
    own = (q.view(B, Hkv, G, C, R, d) @ k.mT).to(dtype)  # (B, H / G, G, C, R, R)
    if causal:
        later = torch.ones(R, R, dtype=torch.bool, device=q.device).triu(1)
        own = own.masked_fill(later, -torch.inf)
    weights = torch.cat([before, own], -1).softmax(-1).to(v.dtype)
    before, own = weights.split([E, R], -1)
    out: Tensor = (before.reshape(B, Hkv, G * rows, E) @ context_v).view(B, Hkv, G, C, R, d) + own @ v
    return out.reshape(B, H, rows, d)


def by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    visible: BlockVisibility,
    attention: Callable[..., Any] = flex_attention,
) -> Tensor:
    keys = torch.cat([context_k, k], 2)
    values = torch.cat([context_v, v], 2)
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = attention(q, keys, values, block_mask=visible.block_mask, enable_gqa=grouped)
    return out


@dataclass(frozen=True, eq=False)
class Blocks:
    """N blocks in each row of a batch, in ascending order."""

    anchors: Tensor  # (B, N) int64, the slot of each root
    live: Tensor  # (B, N) bool; False for a block without an anchor, in the last slot: it sees and predicts nothing

    def starts(self, documents: Tensor) -> Tensor:
        """Return (B, N) int64: the first slot that each block sees, where its root's document starts. documents (B,
        T)."""
        return torch.where(self.live, document_starts(documents).gather(1, self.anchors), self.anchors)

    def labels(self, rows: Rows, depth: int) -> tuple[Tensor, Tensor]:
        """Return the slots (B, N, K) int64 of the tokens that each block predicts, clamped to the row, and valid (B, N,
        K) bool, True for labels up to the first token that is not one. All labels are in the root's
        document."""
        k = torch.arange(depth, device=self.anchors.device)
        slots = self.anchors[..., None] + 1 + k  # (B, N, K)
        inside = slots.clamp_max(rows.tokens.shape[1] - 1)
        is_label, document = (x.gather(1, inside.flatten(1)).view_as(inside) for x in (rows.loss_mask, rows.documents))
        own = document == rows.documents.gather(1, self.anchors)[..., None]
        valid = is_label & own & (slots == inside) & self.live[..., None]
        return inside, valid.cumprod(2).bool()


def draw_blocks(rows: Rows, count: int) -> Blocks:
    """Return at most `count` blocks for each row (B, T), with roots drawn from the tokens before a label.

    The first token of a document is never a root, because drafting begins after a prompt.
    """
    B, T = rows.tokens.shape
    can_be_root = supervised(rows, 2).roll(-1, dims=1)
    # Drawn on the CPU for every device, because the labels are counted there before the batch is moved. float64 avoids
    # ties.
    generator = torch.Generator().manual_seed(rows.seed)
    priority = torch.rand(B, T, generator=generator, dtype=torch.float64).to(can_be_root.device)
    drawn = priority.masked_fill(~can_be_root, -1).topk(min(count, T), dim=1)
    anchors = drawn.indices.masked_fill(drawn.values < 0, T - 1).sort(dim=1).values
    return Blocks(anchors, anchors < T - 1)  # the last token has no next token, so it is never a root


def all_blocks(documents: Tensor) -> Blocks:
    """Return a block at every token of each row (B, T) except the first."""
    anchors = torch.arange(1, documents.shape[1], device=documents.device).expand(len(documents), -1)
    return Blocks(anchors, torch.ones_like(anchors, dtype=torch.bool))
