"""First weights of a new head: PyTorch's, or computed from the target's features over some text.

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
from heads.target.model import FrozenTarget

PROBED_AT_ONCE = 32
"""Number of rows of the probed text in one pass of the target."""


@dataclass(frozen=True)
class TargetProbe:
    """The target's features over some text, and the layers that turn them into logits."""

    tokens: Tensor  # (B, T) int64
    embeddings: Tensor  # (B, T, D)
    aux_hidden_states: Tensor  # (B, T, L * D)
    hidden: Tensor  # (B, T, D), after the final norm
    scales: Tensor
    """(L,) the root mean square of each auxiliary hidden state.

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
        scales=by_layer.square().mean((0, 1, 3)).sqrt(),
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
