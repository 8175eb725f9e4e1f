"""First weights of attention that copies: induction heads (Olsson et al., arXiv 2209.11895).

What followed a token the last time is likely to follow it again. Training finds such attention late and suddenly, at a
step that varies with the seed; until then a head has little to draft from. So the first query head of each group starts
with it. The query is the token just read, a slot's key is the token before the slot's own, and its value is the token
that followed. All three are fitted by least squares to the inputs of the projections.

Letters: N probed slots, D hidden, H attention heads, d head dimension, n matched dimensions of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.layers import Attention, NormedAttention

MATCH = 10.0
"""Mean score of a key that matches the query, before training."""
RIDGE = 0.05
"""Penalty of the least squares, relative to the mean square of the inputs."""


@dataclass(frozen=True)
class AttentionProbe:
    """Inputs of attention in N slots, and what it should find and write there."""

    queries: Tensor
    """(N, D') inputs of the query projection."""
    keys: Tensor
    """(N, D') inputs of the key and value projections."""
    read: Tensor
    """(N, D) embedding of the token that a query looks for."""
    before: Tensor
    """(N, D) embedding of the token that a slot is found by."""
    written: Tensor
    """(N, D) direction that a slot adds to the residual stream."""


def directions(lm_head: Tensor, tokens: Tensor) -> Tensor:
    """Return (N, D) float32: the rows of an output head (V, D) for tokens (N,), at unit size."""
    rows = lm_head[tokens.to(lm_head.device)].float().cpu()
    return torch.nn.functional.rms_norm(rows, rows.shape[-1:])


@torch.no_grad()
def begin_copying(attention: Attention, probe: AttentionProbe, device: torch.device) -> None:
    """Add copying heads to the projections of attention, whose weights are small and random. Computed on `device`.

    Queries and keys are matched in `matched_dimensions`. `attention` is on the CPU.
    """
    d = attention.head_dim
    heads = attention.k_proj.out_features // d  # number of key heads
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
    for weight, found in ((q, by_query), (k, by_key)):  # the first query head and the key head of each group
        weight[:, 0, slots] += (gain * found).T.reshape(heads, len(slots), -1).cpu()
    attention.v_proj.weight += by_value.T.cpu()
    attention.o_proj.weight.view(-1, heads, q.shape[1], d)[:, :, 0] += basis.view(-1, heads, d).cpu()
    if isinstance(attention, NormedAttention):  # its norms cancel the gain, so their weight sets the score
        query = attention.q_norm(attention.q_proj(queries.cpu()).view(-1, *q.shape[:2], d)[:, :, 0])
        key = attention.k_norm(attention.k_proj(keys.cpu()).view(-1, heads, d))
        attention.q_norm.weight[slots] *= MATCH * d**0.5 / (query * key).sum(-1).mean().clamp_min(1e-6)


def matched_dimensions(head_dim: int) -> Tensor:
    """Return (n,): the rotary dimensions that rotate slowest and so hardly depend on distance."""
    slow = torch.arange(head_dim // 2 - max(1, 3 * head_dim // 16), head_dim // 2)
    return torch.cat([slow, slow + head_dim // 2])


def token_axes(attention: Attention, read: Tensor) -> Tensor:
    """Return (D, heads * n): the axes along which tokens with embeddings (N, D) differ most, for all key heads of
    attention.

    They are orthogonal to the mean, because there is no bias to subtract it.
    """
    count = attention.k_proj.out_features // attention.head_dim * len(matched_dimensions(attention.head_dim))
    axes = principal_axes(read, count)
    mean = torch.nn.functional.normalize(read.mean(0), dim=0)
    axes = axes - mean[:, None] * (mean @ axes)
    return axes / (read @ axes).std(0).clamp_min(1e-6)


def principal_axes(x: Tensor, count: int) -> Tensor:
    """Return (D, count): the principal axes of (N, D) as columns, the widest first. They repeat if D is less than
    `count`."""
    centred = x - x.mean(0)
    axes: Tensor = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)
    return axes[:, torch.arange(count, device=x.device) % axes.shape[1]]


def least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return (D', m): the linear map from inputs (N, D') to outputs (N, m)."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    found: Tensor = torch.linalg.solve(gram, inputs.T @ outputs)
    return found
