"""Attention that begins by copying: induction heads (Olsson et al., arXiv 2209.11895).

What followed a token the last time is likely to follow it again. Training finds such attention late, and all at once:
until then a head has little to draft from, and when that happens varies with the seed. So the first query head of each
group begins with it: the query is the token just read, a slot's key is the token that stood before the slot's, and its
value is what followed. All are least squares of what the projections read.

Letters: N probed slots, D hidden, H attention heads, G query heads per key head, d head dimension, n matched dimensions
of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.layers import Attention

MATCH = 10.0
"""Score of a key that matches the query, on average, before training."""
RIDGE = 0.05
"""Penalty of the least squares, beside unit inputs."""


@dataclass(frozen=True)
class Probe:
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
def begin_copying(attention: Attention, probe: Probe) -> None:
    """Add to the projections of attention, whose weights are small and random, heads that copy.

    Matched are the rotary dimensions that turn slowest, at any distance alike.
    """
    d = attention.head_dim
    key_heads = attention.k_proj.out_features // d
    G = attention.q_proj.out_features // d // key_heads
    slow = torch.arange(d // 2 - max(1, 3 * d // 16), d // 2)
    slots = torch.cat([slow, slow + d // 2])  # (n,)
    tokens, writes = principal_axes(probe.read), principal_axes(probe.written)
    mean = torch.nn.functional.normalize(probe.read.mean(0), dim=0)
    for head in range(key_heads):
        axes = band(tokens, head, len(slots))
        axes = axes - mean[:, None] * (mean @ axes)  # (D, n): no bias takes the mean away, so it is not looked at
        axes = axes / (probe.read @ axes).std(0).clamp_min(1e-6)
        wanted = probe.before @ axes
        by_query, by_key = least_squares(probe.queries, probe.read @ axes), least_squares(probe.keys, wanted)
        match = ((probe.keys @ by_key) * wanted).sum(-1).mean()
        gain = (MATCH * d**0.5 / match.clamp_min(1e-6)).sqrt()
        first = head * G * d
        attention.q_proj.weight[first + slots] += (gain * by_query).T
        attention.k_proj.weight[head * d + slots] += (gain * by_key).T
        basis = band(writes, head, d)  # (D, d)
        by_value = least_squares(probe.keys, probe.written @ basis)
        attention.v_proj.weight[head * d : head * d + d] += by_value.T
        attention.o_proj.weight[:, first : first + d] += basis


def principal_axes(x: Tensor) -> Tensor:
    """(D, D) the principal axes of (N, D), as columns, the widest first."""
    centred = x - x.mean(0)
    axes: Tensor = torch.linalg.eigh(centred.T @ centred).eigenvectors
    return axes.flip(1)


def band(axes: Tensor, number: int, width: int) -> Tensor:
    """The axes (D, width) of a key head; heads share them out, and begin anew where they end."""
    index = torch.arange(number * width, (number + 1) * width) % axes.shape[1]
    return axes[:, index]


def least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """(D', m) the map from inputs (N, D') to outputs (N, m)."""
    gram = inputs.T @ inputs
    penalty = RIDGE * gram.diagonal().mean()
    found: Tensor = torch.linalg.solve(gram + penalty * torch.eye(len(gram)), inputs.T @ outputs)
    return found
