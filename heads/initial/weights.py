"""First weights of a new head: PyTorch's, or made from the target's features over some text.

Letters: B rows, T tokens, D hidden, L auxiliary layers, V vocabulary.
"""

from dataclasses import dataclass
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


@torch.no_grad()
def begin(head: Any, target: FrozenTarget, token_counts: Tensor) -> None:
    """Give a new head the weights that `initial_weights` of its config names; token_counts (V,): labels in the data.

    A head has two methods for it: `initialise`, which makes it hand on what the target has, from small random weights,
    and `copying`, which says what its first attention is to find and to write.
    """
    initial = head.config.initial_weights
    if initial == RANDOM:
        return
    probe = probe_target(target, head.aux_layer_ids, token_counts)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    head.initialise(probe)
    if initial == COPYING:
        attention, inputs = head.copying(probe)
        begin_copying(attention, inputs, target.device)


def probe_target(target: FrozenTarget, aux_layer_ids: tuple[int, ...], token_counts: Tensor) -> TargetProbe:
    """Return the features, on the CPU, of tokens drawn in proportion to their counts as labels."""
    tokens = probe_tokens(token_counts, target.hidden_size)
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
    )


def probe_tokens(token_counts: Tensor, hidden_size: int) -> Tensor:
    """Return (B, 64) tokens, four times as many as the hidden size, drawn in proportion to their counts (V,), always
    the same ones."""
    draw = torch.Generator().manual_seed(0)
    rows = max(4, hidden_size // 16)
    return torch.multinomial(token_counts.float() + 1e-3, rows * 64, replacement=True, generator=draw).view(rows, 64)
