"""Attention for the training-time test: a causal pass in blocks, and one extra key for each earlier step, in one
softmax.

The causal pass uses FlexAttention on a GPU. On other devices no score tensor is larger than (rows of one block) x T,
because the backward pass recomputes the weights of each block. The extra keys, one per row and step, are merged through
the log-sum-exp.

Letters: B batch, H query heads, G query heads per key head, T tokens, d head dimension, I own keys of each row.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

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
) -> Tensor:
    """Return causal attention inside documents, in which row t also sees slot t of each of `own_keys`.

    With a sliding `window`, a row sees only keys fewer than `window` positions before it. With I own keys row t is at
    position t + I, and the window ends there.

    q (B, H, T, d); k, v (B, H / G, T, d); documents (B, T) int64; own keys and values as k and v, one pair for each
    earlier step of the training-time test. Returns (B, H, T, d); differentiable once. Scores are at least float32.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    reach = None if window is None else window - len(own_keys)
    with torch.autocast(q.device.type, enabled=False):
        if q.is_cuda:
            return by_flex(q, k, v, documents, own_keys, own_values, reach, compiled_flex_attention())
        out: Tensor = _CausalAttention.apply(q, k, v, documents, reach, *own_keys, *own_values)  # type: ignore[no-untyped-call]
    return out


def by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    reach: int | None,
    attention: Callable[..., Any] = flex_attention,
) -> Tensor:
    """Compute `causal_attention` with FlexAttention, compiled or eager. A row sees `reach` slots, its own included."""
    mask, grouped = packed_mask(documents, reach), q.shape[1] != k.shape[1]
    aux = AuxRequest(lse=True) if own_keys else None
    made = attention(q, k, v, block_mask=mask, enable_gqa=grouped, return_aux=aux)
    if not own_keys:
        return made  # type: ignore[no-any-return]
    out, lse = made[0], made[1].lse  # (B, H, T, d), (B, H, T)
    q5 = _grouped(q, k).to(lse.dtype)  # (B, H / G, G, T, d)
    scores = [(q5 * key[:, :, None]).sum(-1).flatten(1, 2) / math.sqrt(q.shape[3]) for key in own_keys]
    shares = torch.stack([lse, *scores]).softmax(0)[..., None]  # (1 + I, B, H, T, 1)
    merged = _grouped(out * shares[0], v)
    for share, value in zip(shares[1:], own_values, strict=True):
        merged = merged + _grouped(share, v) * value[:, :, None]
    return merged.flatten(1, 2).to(v.dtype)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, reach: int | None, *own: Tensor
    ) -> Tensor:
        wide, H = torch.promote_types(q.dtype, torch.float32), q.shape[1]
        outs, lses = [], []
        for first, start, stop in _blocks(q.shape[2], reach):
            scores = _scores(q, k, documents, first, start, stop, reach)  # (B, H / G, G * block, stop - first)
            weights = scores.softmax(-1)
            # The log-sum-exp comes from the likeliest key, because a softmax is faster than one exp of the same size.
            lses.append(_unfold((scores.amax(-1) - weights.amax(-1).log_())[..., None], H))
            outs.append(_unfold(weights.to(v.dtype) @ v[:, :, first:stop], H))
        out, lse = torch.cat(outs, 2), torch.cat(lses, 2)  # (B, H, T, d), (B, H, T, 1)
        if own:
            keys, values = _halves(own)
            q5, scale = _grouped(q, k).to(wide), 1 / math.sqrt(q.shape[3])  # (B, H / G, G, T, d)
            scores = torch.stack([lse, *((q5 * key).sum(-1).mul_(scale).view_as(lse) for key in keys)])
            shares = scores.softmax(0)  # (1 + I, B, H, T, 1): of the causal keys, then of each own key
            by_key = _grouped(out * shares[0], v)
            for share, value in zip(shares[1:], values, strict=True):
                by_key.addcmul_(_grouped(share, v), value)
            out = by_key.view_as(out).to(q.dtype)
        else:
            shares = torch.ones_like(lse)[None]
        ctx.reach = reach
        ctx.save_for_backward(q, k, v, documents, out, shares, *own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, documents, out, shares, *own = ctx.saved_tensors
        H, G, scale = q.shape[1], q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[3])
        wide = shares.dtype
        # With p the weights of the whole softmax, d score = p * (grad . value - delta).
        grad = grad.to(wide)
        delta = (grad * out).sum(-1, keepdim=True)  # (B, H, T, 1)
        # A block's weights are recomputed as a softmax over its own keys. Their share of the whole softmax is applied
        # to tensors of width d.
        causal_grad, causal_delta = (grad * shares[0]).to(v.dtype), delta * shares[0]
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for first, start, stop in _blocks(q.shape[2], ctx.reach):
            rows, seen = slice(start, stop), slice(first, stop)
            weights = _scores(q, k, documents, first, start, stop, ctx.reach).softmax(-1)
            part = _fold(causal_grad[:, :, rows], G)  # (B, H / G, G * block, d)
            dv[:, :, seen] += weights.to(v.dtype).mT @ part
            dscores = (part @ v[:, :, seen].mT).to(wide).sub_(_fold(causal_delta[:, :, rows], G)).mul_(weights)
            dscores = dscores.mul_(scale).to(q.dtype)
            dq[:, :, rows] = _unfold(dscores @ k[:, :, seen], H)
            dk[:, :, seen] += dscores.mT @ _fold(q[:, :, rows], G)
        d_own: list[Tensor] = []
        if own:
            q5, grad, delta, dq5 = (_grouped(x, k) for x in (q.to(wide), grad, delta, dq.to(wide)))
            keys, values = _halves(own)
            dkeys, dvalues = [], []
            for share, key, value in zip(_grouped(shares, k)[1:], keys, values, strict=True):
                dscore = ((grad * value).sum(-1, keepdim=True) - delta) * share * scale  # (B, H / G, G, T, 1)
                dq5.addcmul_(dscore, key)
                dkeys.append((dscore * q5).sum(2).to(k.dtype))
                dvalues.append((share * grad).sum(2).to(v.dtype))
            dq, d_own = dq5.view_as(q).to(q.dtype), [*dkeys, *dvalues]
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, *d_own


def _halves(own: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return own keys and own values, (B, H / G, 1, T, d) each, to be broadcast over G."""
    shaped = [x[:, :, None] for x in own]
    return shaped[: len(own) // 2], shaped[len(own) // 2 :]


def _blocks(T: int, reach: int | None) -> list[tuple[int, int, int]]:
    """Return (first key that the rows see, first row, end of both) for each block."""
    far = T if reach is None else reach - 1
    return [(max(0, start - far), start, min(start + BLOCK, T)) for start in range(0, T, BLOCK)]


def _scores(q: Tensor, k: Tensor, documents: Tensor, first: int, start: int, stop: int, reach: int | None) -> Tensor:
    """Return the scaled scores (B, H / G, G * block, stop - first) of rows start..stop-1 over the keys from `first` on,
    at least float32, -inf where hidden."""
    rows, G = slice(start, stop), q.shape[1] // k.shape[1]
    scores = (_fold(q[:, :, rows], G) @ k[:, :, first:stop].mT).to(torch.promote_types(q.dtype, torch.float32))
    scores.mul_(1 / math.sqrt(q.shape[3]))
    key = torch.arange(first, stop, device=q.device)
    row = key[start - first :, None]
    other = documents[:, rows, None] != documents[:, None, first:stop]  # (B, block, stop - first)
    hidden = other.logical_or_(row < key)
    if reach is not None:
        hidden.logical_or_(row - key >= reach)
    mask = torch.zeros(hidden.shape, dtype=scores.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    scores.view(*k.shape[:2], G, stop - start, stop - first).add_(mask[:, None, None])
    return scores


def _fold(x: Tensor, G: int) -> Tensor:
    """Group the query heads that share a key head: (B, H, rows, d) -> (B, H / G, G * rows, d)."""
    B, H, rows, d = x.shape
    return x.reshape(B, H // G, G * rows, d)


def _unfold(x: Tensor, H: int) -> Tensor:
    """Invert `_fold`: (B, H / G, G * rows, d) -> (B, H, rows, d)."""
    B, _, _, d = x.shape
    return x.reshape(B, H, -1, d)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Split the query heads by key head: (..., B, H, T, d) -> (..., B, H / G, G, T, d)."""
    grouped: Tensor = x.unflatten(-3, (k.shape[1], -1))
    return grouped
