"""Initial weights of a new head: PyTorch's, or computed from the target's features over some text.

Letters: B rows, T tokens, N probed slots, D hidden, L auxiliary layers, V vocabulary, d head dimension, m or n
dimensions in which tokens are matched.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad, rms_norm

from heads.parts.layers import Attention, NormedAttention
from heads.parts.part_settings import COPYING, RANDOM
from heads.targets.families import final_norm_scale
from heads.targets.frozen_target import FrozenTarget

PROBED_AT_ONCE = 32
"""Number of rows of the probed text in one pass of the target."""
UNSURE = 0.3
"""Factor of a new head's logits. At their full size they would be as sure as the target's and mostly wrong, and the
first steps of training would do nothing but make them smaller."""


@dataclass(frozen=True)
class TargetProbe:
    """The target's features over some text, and the layers that turn them into logits."""

    tokens: Tensor  # (B, T) int64
    embeddings: Tensor  # (B, T, D)
    aux_hidden_states: Tensor  # (B, T, L * D)
    hidden: Tensor  # (B, T, D), after the final norm
    scales: Tensor
    """(L,) the size of each auxiliary hidden state: the median over tokens of its root mean square. A mean would be
    that of a text's first token alone, which has massive activations in most models (arXiv 2402.17762).

    Residual streams grow with depth: in the quickstart's target from 0.26 at the embeddings to 21 at the highest
    auxiliary layer. A head that starts at that size learns as if its learning rate were that much smaller.
    """
    norm: Tensor  # (D,), the scale of the final norm
    lm_head_weight: Tensor  # (V, D)
    logit_scale: float
    token_counts: Tensor  # (V,), labels in the data
    embed_tokens: Callable[[Tensor], Tensor]
    """The target's input embeddings."""

    @cached_property
    def frequency(self) -> Tensor:
        """(V,) float32 on the CPU: fraction of the labels that each token makes up; above 0 also for tokens that are
        never labels."""
        count = self.token_counts.cpu().float() + 0.5
        return count / count.sum()

    @cached_property
    def readout(self) -> Tensor:
        """(V, D) float32 on the CPU: output head, multiplied by the family's factor of the logits."""
        return self.lm_head_weight.cpu().float() * self.logit_scale

    @cached_property
    def axes(self) -> Tensor:
        """(D, D): the principal axes of the highest auxiliary hidden state as columns, the widest first."""
        D = self.hidden.shape[-1]
        return principal_axes(self.aux_hidden_states[..., -D:].flatten(0, 1).float(), D)

    @property
    def evening(self) -> Tensor:
        """(L * D,) factors that scale every auxiliary hidden state to the size of the largest.

        They multiply a projection whose output is normed. Its own size has no effect, except that the optimizer changes
        it less.
        """
        return (self.scales.max() / self.scales).repeat_interleave(self.embeddings.shape[-1])


@torch.no_grad()
def begin(head: Any, target: FrozenTarget, token_counts: Tensor, *, closely: bool = False) -> None:
    """Set the weights of a new head as `initial_weights` in its config says. token_counts (V,): labels in the data.

    A head has two methods for it. `initialise` makes it pass on the target's features, starting from small random
    weights. `copying` returns the attention that should copy with its `AttentionProbe`, or None. `closely`: use a
    longer text. Without any label, when only the shape of a head is needed, the weights stay PyTorch's.
    """
    initial = head.config.initial_weights
    if initial == RANDOM or not token_counts.any():
        return
    probe = probe_target(target, head.aux_layer_ids, token_counts, closely)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    head.initialise(probe)
    found = head.copying(probe) if initial == COPYING else None
    if found is not None:
        attention, inputs = found
        begin_copying(attention, inputs, target.device)


def probe_target(
    target: FrozenTarget, aux_layer_ids: tuple[int, ...], token_counts: Tensor, closely: bool
) -> TargetProbe:
    """Return the features, on the CPU, of tokens drawn in proportion to their counts as labels."""
    tokens = probe_tokens(token_counts, probed_rows(target.hidden_size, closely))
    found = []
    for rows in tokens.to(target.device).split(PROBED_AT_ONCE):
        positions = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
        found.append(target.packed_features(rows, positions, torch.zeros_like(rows), aux_layer_ids))
    aux = torch.cat([features.aux_hidden_states.cpu() for features in found])
    by_layer = aux.float().unflatten(-1, (len(aux_layer_ids), target.hidden_size))  # (B, T, L, D)
    return TargetProbe(
        tokens=tokens,
        embeddings=target.shared.embed_tokens(tokens.to(target.device)).float().cpu(),
        aux_hidden_states=aux,
        hidden=torch.cat([features.hidden.cpu() for features in found]),
        scales=by_layer.square().mean(-1).sqrt().flatten(0, 1).median(0).values,
        norm=final_norm_scale(target.base, target.layers, target.hidden_size),
        lm_head_weight=target.lm_head_weight,
        logit_scale=target.logit_scale,
        token_counts=token_counts,
        embed_tokens=target.shared.embed_tokens,
    )


def probed_rows(hidden_size: int, closely: bool) -> int:
    """Return the number of rows of the probed text, with at least four tokens for each dimension of a hidden state."""
    return max(96 if closely else 4, hidden_size // 16)


def probe_tokens(token_counts: Tensor, rows: int) -> Tensor:
    """Return (rows, 64) tokens, drawn in proportion to their counts (V,). They are always the same."""
    draw = torch.Generator().manual_seed(0)
    return torch.multinomial(token_counts.float() + 1e-3, rows * 64, replacement=True, generator=draw).view(rows, 64)


# Attention that copies: induction heads (Olsson et al., arXiv 2209.11895). What followed a token the last time is
# likely to follow it again. Training finds such attention late and suddenly, at a step that varies with the seed; until
# then a head has little to draft from. So the first query head of each group starts with it. The query is the token
# just read, a slot's key is the token before the slot's own, and its value is the token that followed. All three are
# fitted by least squares to the inputs of the projections.

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
    return rms_norm(rows, rows.shape[-1:])


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
    mean = normalize(read.mean(0), dim=0)
    axes = axes - mean[:, None] * (mean @ axes)
    return axes / (read @ axes).std(0).clamp_min(1e-6)


def principal_axes(x: Tensor, count: int) -> Tensor:
    """Return (D, count): the principal axes of (N, D) as columns, the widest first. They repeat if D is less than
    `count`."""
    centred = x - x.mean(0)
    axes: Tensor = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)
    return axes[:, torch.arange(count, device=x.device) % axes.shape[1]]


def resized(axes: Tensor, width: int) -> Tensor:
    """Return (D, width): the first of the axes (D, D), or all of them and zeros."""
    return pad(axes, (0, width - axes.shape[1]))


def least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return (D', m): the linear map from inputs (N, D') to outputs (N, m)."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    found: Tensor = torch.linalg.solve(gram, inputs.T @ outputs)
    return found
