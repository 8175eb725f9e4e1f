"""Attention that begins by copying: induction heads (Olsson et al., arXiv 2209.11895).

What followed a token the last time is likely to follow it again. Training finds such attention late, and all at once:
until then a head has little to draft from, and when that happens varies with the seed. So the first query head of each
group begins with it: the query is the token just read, a slot's key is the token that stood before the slot's, and its
value is what followed. All are least squares of what the projections read.

Letters: N probed slots, D hidden, H attention heads, d head dimension, n matched dimensions of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.layers import Attention, NormedAttention

MATCH = 10.0
"""Score of a key that matches the query, on average, before training."""
RIDGE = 0.05
"""Penalty of the least squares, beside unit inputs."""


@dataclass(frozen=True)
class AttentionProbe:
    """Inputs of attention in N slots, and the things that it is to find and to write there."""

    queries: Tensor
    """(N, D') inputs of the query's projection."""
    keys: Tensor
    """(N, D') inputs of the projections of keys and values."""
    read: Tensor
    """(N, D) embedding of the token by which a query looks."""
    before: Tensor
    """(N, D) embedding of the token by which a slot is found."""
    written: Tensor
    """(N, D) direction that a slot adds to the residual stream."""


def directions(lm_head: Tensor, tokens: Tensor) -> Tensor:
    """(N, D) float32, the rows of an output head (V, D) for tokens (N,), at unit size."""
    rows = lm_head[tokens.to(lm_head.device)].float().cpu()
    return torch.nn.functional.rms_norm(rows, rows.shape[-1:])


@torch.no_grad()
def begin_copying(attention: Attention, probe: AttentionProbe, device: torch.device) -> None:
    """Add to the projections of attention, whose weights are small and random, heads that copy; computed on `device`.

    Matched are `matched_dimensions`. `attention` is on the CPU.
    """
    d = attention.head_dim
    heads = attention.k_proj.out_features // d  # of keys
    slots = matched_dimensions(d)
    queries, keys, read, before, written = (
        x.to(device) for x in (probe.queries, probe.keys, probe.read, probe.before, probe.written)
    )
    axes = token_axes(attention, read)
    wanted, basis = before @ axes, principal_axes(written, heads * d)  # (N, heads * n), (D, heads * d)
    by_query = least_squares(queries, read @ axes)
    by_key, by_value = least_squares(keys, torch.cat([wanted, written @ basis], 1)).split([axes.shape[1], heads * d], 1)
    match = ((keys @ by_key) * wanted).mean(0).view(heads, -1).sum(1)
    gain = (MATCH * d**0.5 / match.clamp_min(1e-6)).sqrt().repeat_interleave(len(slots))
    q, k = (proj.weight.view(heads, -1, d, proj.in_features) for proj in (attention.q_proj, attention.k_proj))
    for weight, found in ((q, by_query), (k, by_key)):  # of each group, the first query head and the key head
        weight[:, 0, slots] += (gain * found).T.reshape(heads, len(slots), -1).cpu()
    attention.v_proj.weight += by_value.T.cpu()
    attention.o_proj.weight.view(-1, heads, q.shape[1], d)[:, :, 0] += basis.view(-1, heads, d).cpu()
    if isinstance(attention, NormedAttention):  # which undoes the gain: its norms are what sets the score
        query = attention.q_norm(attention.q_proj(queries.cpu()).view(-1, *q.shape[:2], d)[:, :, 0])
        key = attention.k_norm(attention.k_proj(keys.cpu()).view(-1, heads, d))
        attention.q_norm.weight[slots] *= MATCH * d**0.5 / (query * key).sum(-1).mean().clamp_min(1e-6)


def matched_dimensions(head_dim: int) -> Tensor:
    """(n,) the rotary dimensions that turn slowest, at any distance alike."""
    slow = torch.arange(head_dim // 2 - max(1, 3 * head_dim // 16), head_dim // 2)
    return torch.cat([slow, slow + head_dim // 2])


def token_axes(attention: Attention, read: Tensor) -> Tensor:
    """(D, heads * n) the axes along which tokens, of embeddings (N, D), differ most, for every key head of attention.

    They are at right angles to the mean, which no bias takes away.
    """
    count = attention.k_proj.out_features // attention.head_dim * len(matched_dimensions(attention.head_dim))
    axes = principal_axes(read, count)
    mean = torch.nn.functional.normalize(read.mean(0), dim=0)
    axes = axes - mean[:, None] * (mean @ axes)
    return axes / (read @ axes).std(0).clamp_min(1e-6)


def principal_axes(x: Tensor, count: int) -> Tensor:
    """(D, count) the principal axes of (N, D), as columns, the widest first; all of them again where D are too few."""
    centred = x - x.mean(0)
    axes: Tensor = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)
    return axes[:, torch.arange(count, device=x.device) % axes.shape[1]]


def least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """(D', m) the map from inputs (N, D') to outputs (N, m)."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    found: Tensor = torch.linalg.solve(gram, inputs.T @ outputs)
    return found
