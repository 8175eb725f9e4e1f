"""Attention for the training-time test: a causal pass, and one extra key for each earlier step, in one softmax.

The causal pass uses FlexAttention on a GPU. On other devices it goes in blocks of rows, which the backward pass
computes again, so that no score tensor is larger than (rows of one block) x T. The extra keys, one per row and step,
are merged through the log-sum-exp.

Letters: B batch, H query heads, G query heads per key head, T tokens, N rows, d head dimension, I own keys of each row,
R rows of a block, n keys that they see.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.utils.checkpoint import checkpoint

from heads.targets.masks import compiled_flex_attention, packed_mask

BLOCK = 128
"""Number of query rows in a block. A block reads only the keys that its last row can see."""


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    own_keys: Sequence[Tensor] = (),
    own_values: Sequence[Tensor] = (),
    window: int | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Return causal attention inside documents, in which each row also sees its own of each of `own_keys`.

    With a sliding `window`, a row sees only keys fewer than `window` positions before it. With I own keys the row of
    slot t is at position t + I, and the window ends there.

    q (B, H, N, d), the rows of `slots` (N,) int64, ascending; None: of all T; k, v (B, H / G, T, d); documents (B, T)
    int64; own keys and values (B, H / G, N, d), one pair for each earlier step of the training-time test. Returns (B,
    H, N, d). Scores are at least float32.
    """
    q = q.to(v.dtype)
    k = k.to(v.dtype)
    reach = None if window is None else window - len(own_keys)
    with torch.autocast(q.device.type, enabled=False):
        if q.is_cuda:
            return by_flex(q, k, v, documents, own_keys, own_values, reach, compiled_flex_attention(), slots)
        return by_blocks(q, k, v, documents, own_keys, own_values, reach, slots)


def by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    reach: int | None,
    attention: Callable[..., Any] = flex_attention,
    slots: Tensor | None = None,
) -> Tensor:
    """Compute `causal_attention` with FlexAttention, compiled or eager. A row sees `reach` slots, its own included."""
    mask = packed_mask(documents, reach, slots)
    grouped = q.shape[1] != k.shape[1]
    aux = AuxRequest(lse=True) if own_keys else None
    out = attention(q, k, v, block_mask=mask, enable_gqa=grouped, return_aux=aux)
    return _merge(q, out[0], out[1].lse, own_keys, own_values) if own_keys else out


def by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    reach: int | None,
    slots: Tensor | None = None,
) -> Tensor:
    """Compute `causal_attention` block by block."""
    outs = []
    lses = []
    acc_dtype = torch.promote_types(v.dtype, torch.float32)  # in which the gradients of keys and values are summed
    k = k.to(acc_dtype)
    v = v.to(acc_dtype)
    places = list(range(k.shape[2])) if slots is None else slots.tolist()
    for start in range(0, q.shape[2], BLOCK):
        rows = slice(start, start + BLOCK)
        first, last = places[rows][0], places[rows][-1]
        seen = slice(0 if reach is None else max(0, first - reach + 1), last + 1)
        row = torch.tensor(places[rows], device=q.device) - seen.start
        inputs = (q[:, :, rows], k[:, :, seen], v[:, :, seen], documents[:, seen], row)
        out, lse = checkpoint(_block, *inputs, reach, use_reentrant=False, preserve_rng_state=False)
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs, 2)
    lse = torch.cat(lses, 2)
    return _merge(q, out, lse, own_keys, own_values) if own_keys else out


def _block(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, row: Tensor, reach: int | None) -> tuple[Tensor, Tensor]:
    """Return the attention (B, H, R, d) of rows q (B, H, R, d), and the log-sum-exp (B, H, R) of their scores. row
    (R,): the rows' own slots among the n keys, which are of documents (B, n)."""
    G = q.shape[1] // k.shape[1]
    R = q.shape[2]
    n = k.shape[2]
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    key = torch.arange(n, device=q.device)
    row = row[:, None]
    hidden = (documents[:, row] != documents[:, None]) | (row < key)  # (B, R, n)
    if reach is not None:
        hidden = hidden | (row - key >= reach)
    folded = (q / math.sqrt(q.shape[3])).unflatten(1, (-1, G)).flatten(2, 3)  # query heads that share a key head
    scores = (folded @ k.mT).to(torch.promote_types(q.dtype, torch.float32)).unflatten(2, (G, R))  # (B, H / G, G, R, n)
    mask = torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(hidden, -torch.inf)
    weights, lse = _SoftmaxAndLse.apply(scores + mask[:, None, None])  # type: ignore[no-untyped-call]
    out = weights.to(v.dtype).flatten(2, 3) @ v
    return out.unflatten(2, (G, R)).flatten(1, 2), lse.flatten(1, 2)


class _SoftmaxAndLse(torch.autograd.Function):
    """Softmax of scores (..., n), and their log-sum-exp (...). Both take one exponential, and none in the backward
    pass."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        return weights, scores.amax(-1) - weights.amax(-1).log_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> Tensor:
        weights: Tensor = ctx.saved_tensors[0]
        inner = (grad * weights).sum(-1) - grad_lse
        return (grad - inner[..., None]).mul_(weights)


def _merge(q: Tensor, out: Tensor, lse: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor]) -> Tensor:
    """Return the attention over the causal keys, which is out (B, H, T, d) with the log-sum-exp lse (B, H, T) of its
    scores, and over the own keys of each row."""
    groups = own_keys[0].shape[1], -1
    q5 = q.unflatten(1, groups).to(lse.dtype)  # (B, H / G, G, T, d)
    scores = [(q5 * key[:, :, None]).sum(-1).flatten(1, 2) / math.sqrt(q.shape[3]) for key in own_keys]
    shares = torch.stack([lse, *scores]).softmax(0)[..., None]  # (1 + I, B, H, T, 1)
    merged: Tensor = (out * shares[0]).unflatten(1, groups)
    for share, value in zip(shares[1:], own_values, strict=True):
        merged = merged + share.unflatten(1, groups) * value[:, :, None]
    return merged.flatten(1, 2).to(out.dtype)
