"""Attention for the training-time test: one causal pass in blocks, merged with one key per earlier step.

The causal pass returns its log-sum-exp beside its output, and both carry gradients, so that further keys can be merged
into the same softmax afterwards: no score tensor larger than (rows of one block) x T exists, forward or backward.

Letters: B batch, H query heads, G query heads per key head, T tokens, d head dimension.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 128
"""Query rows handled at once; below the diagonal a block reads only the keys that its last row can see."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention inside documents.

    q (B, H, T, d); k, v (B, H / G, T, d); documents (B, T) int64. Returns the output (B, H, T, d) and the log-sum-exp
    of the scaled scores (B, H, T), at least float32. Differentiable once in q, k and v through both results.
    """
    out, lse = _CausalAttention.apply(q, k, v, documents)  # type: ignore[no-untyped-call]
    return out, lse


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for start, stop in _blocks(q.shape[2]):
            scores = _scores(q, k, documents, start, stop)  # (B, H / G, G * block, stop)
            lse = scores.logsumexp(-1)
            weights = torch.exp(scores - lse[..., None]).to(v.dtype)
            outs.append(_unfold(weights @ v[:, :, :stop], q.shape[1]))
            lses.append(_unfold(lse[..., None], q.shape[1])[..., 0])
        out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
        ctx.save_for_backward(q, k, v, documents, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, documents, out, lse = ctx.saved_tensors
        grad_out, grad_lse = grads
        H, G, scale = q.shape[1], q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[3])
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
        # d score = p * (dp - rowsum(grad_out * out) + grad_lse): the softmax rule plus the log-sum-exp's own gradient.
        delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1) - grad_lse  # (B, H, T)
        for start, stop in _blocks(q.shape[2]):
            rows = slice(start, stop)
            weights = torch.exp(_scores(q, k, documents, start, stop) - _fold(lse[:, :, rows, None], G))
            grad = _fold(grad_out[:, :, rows], G)  # (B, H / G, G * block, d)
            dv[:, :, :stop] += weights.to(grad.dtype).mT @ grad
            dscores = weights * ((grad @ v[:, :, :stop].mT).to(lse.dtype) - _fold(delta[:, :, rows, None], G))
            dscores = (dscores * scale).to(q.dtype)
            dq[:, :, rows] = _unfold(dscores @ k[:, :, :stop], H)
            dk[:, :, :stop] += dscores.mT @ _fold(q[:, :, rows], G)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


def merge_steps(q: Tensor, out: Tensor, lse: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Give each row one more key per earlier step, inside the softmax that `out` and `lse` come from.

    q, out (B, H, T, d); lse (B, H, T); keys and values: per earlier step (B, H / G, T, d), the one at the row's own
    slot.
    """
    if not keys:
        return out
    B, _, T, d = q.shape
    shape, scale = (B, keys[0].shape[1], -1, T), 1 / math.sqrt(d)
    # (B, H / G, G, T, width): keys broadcast, never copied
    by_key, merged = q.reshape(*shape, d), out.reshape(*shape, out.shape[3])
    own = [(by_key * k[:, :, None]).sum(-1, dtype=lse.dtype) * scale for k in keys]  # (B, H / G, G, T) each
    weights = torch.stack([lse.reshape(shape), *own], dim=-1).softmax(-1).to(out.dtype)  # (B, H / G, G, T, 1 + steps)
    merged = weights[..., :1] * merged
    for j, v in enumerate(values):
        merged = merged + weights[..., j + 1, None] * v[:, :, None]
    return merged.reshape(out.shape)


def _blocks(T: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, T)) for start in range(0, T, BLOCK)]


def _scores(q: Tensor, k: Tensor, documents: Tensor, start: int, stop: int) -> Tensor:
    """(B, H / G, G * block, stop) scaled scores of rows start..stop-1, at least float32, -inf where hidden."""
    rows, G = slice(start, stop), q.shape[1] // k.shape[1]
    scores = (_fold(q[:, :, rows], G) @ k[:, :, :stop].mT).to(torch.promote_types(q.dtype, torch.float32))
    scores.div_(math.sqrt(q.shape[3]))
    position = torch.arange(stop, device=q.device)
    other = documents[:, rows, None] != documents[:, None, :stop]  # (B, block, stop)
    hidden = other | (position[start:, None] < position)
    scores.view(*k.shape[:2], G, stop - start, stop).masked_fill_(hidden[:, None, None], -torch.inf)
    return scores


def _fold(x: Tensor, G: int) -> Tensor:
    """(B, H, rows, d) -> (B, H / G, G * rows, d): the query heads that share a key head, side by side."""
    B, H, rows, d = x.shape
    return x.reshape(B, H // G, G * rows, d)


def _unfold(x: Tensor, H: int) -> Tensor:
    """The inverse of `_fold`: (B, H / G, G * rows, d) -> (B, H, rows, d)."""
    B, _, _, d = x.shape
    return x.reshape(B, H, -1, d)
