"""First weights of a new head: PyTorch's, or made from the target's features over some text.

Letters: B rows, T tokens, D hidden, L auxiliary layers, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from heads.initial.copying import begin_copying
from heads.layers import COPYING, RANDOM
from heads.target.families import final_norm_scale
from heads.target.frozen import FrozenTarget

PROBED_AT_ONCE = 32
"""Rows of the probed text in one pass of the target."""


@dataclass(frozen=True)
class TargetProbe:
    """The target's features over some text, and the layers that it reads them out with."""

    tokens: Tensor  # (B, T) int64
    embeddings: Tensor  # (B, T, D)
    aux_hidden_states: Tensor  # (B, T, L * D)
    hidden: Tensor  # (B, T, D), after the final norm
    scales: Tensor
    """(L,) the root mean square of each auxiliary hidden state.

    Residual streams grow with depth: in the quickstart's target from 0.26 at the embeddings to 21 at the highest
    auxiliary layer. A head that starts at that size learns as if its rate were that much smaller.
    """
    norm: Tensor  # (D,), the scale of the final norm
    lm_head_weight: Tensor  # (V, D)
    logit_scale: float
    token_counts: Tensor  # (V,), labels in the data
    embed_tokens: Callable[[Tensor], Tensor]
    """The target's input embeddings."""

    @cached_property
    def frequency(self) -> Tensor:
        """(V,) float32 on the CPU: how often each token is a label, as a share; above 0 for those that never are."""
        count = self.token_counts.cpu().float() + 0.5
        return count / count.sum()

    @cached_property
    def readout(self) -> Tensor:
        """(V, D) float32 on the CPU: the output head with the family's factor of its logits."""
        return self.lm_head_weight.cpu().float() * self.logit_scale

    @property
    def evening(self) -> Tensor:
        """(L * D,) factors that bring every auxiliary hidden state to the size of the largest.

        For a projection whose output is normed: its own size has no effect but that the optimizer changes it less.
        """
        return (self.scales.max() / self.scales).repeat_interleave(self.embeddings.shape[-1])


@torch.no_grad()
def begin(head: Any, target: FrozenTarget, token_counts: Tensor, *, closely: bool = False) -> None:
    """Give a new head the weights that `initial_weights` of its config names; token_counts (V,): labels in the data.

    A head has two methods for it: `initialise`, which makes it hand on what the target has, from small random weights,
    and `copying`, which says which attention is to copy, and what it is to find and to write, or None. `closely`: from
    a longer text. Without any label, for a head that is asked for its shape alone, the weights stay PyTorch's.
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
        scales=by_layer.square().mean((0, 1, 3)).sqrt(),
        norm=final_norm_scale(target.base, target.layers, target.hidden_size),
        lm_head_weight=target.lm_head_weight,
        logit_scale=target.logit_scale,
        token_counts=token_counts,
        embed_tokens=target.shared.embed_tokens,
    )


def probed_rows(hidden_size: int, closely: bool) -> int:
    """Number of rows of the probed text: four tokens for each dimension of a hidden state, or more."""
    return max(96 if closely else 4, hidden_size // 16)


def probe_tokens(token_counts: Tensor, rows: int) -> Tensor:
    """Return (rows, 64) tokens, drawn in proportion to their counts (V,), always the same ones."""
    draw = torch.Generator().manual_seed(0)
    return torch.multinomial(token_counts.float() + 1e-3, rows * 64, replacement=True, generator=draw).view(rows, 64)
