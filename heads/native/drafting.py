"""Heads that recycle their state, on the CPU kernels: what `heads.recurrent.Memory` does, in a tenth of the operations.

Letters: B batch, W tokens of each, R = B * W rows, D hidden, L taps, Vd draft vocabulary, S cache slots, E of them
shown, d head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.families import additive
from heads.native.attention import GroupedAttention
from heads.native.feedforward import GatedMLP
from heads.native.kernels import load
from heads.native.linear import Norm, Product
from heads.native.stack import KernelStack


@dataclass(frozen=True)
class KernelModule:
    """One module of a head: what goes into its decoder layer, the layer, and what is made of its stream."""

    enter: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    """(R, D) embeddings and states -> the layer's stream, which it may change, and its input where that is another."""
    layer: KernelStack
    leave: Callable[[Tensor], Tensor]
    """The layer's stream -> the state to recycle."""


@dataclass(frozen=True)
class KernelDraft:
    """A whole head, from its weights as they were when this was made."""

    modules: list[KernelModule]
    start: Callable[[Tensor, Tensor], Tensor]
    """The target's features, (R, L * D) and (R, D) -> the state that the first step recycles (R, D)."""
    normed: Callable[[Tensor], Tensor]
    """Recycled states -> what the output head reads."""
    output: Product  # (R, D) -> (R, Vd)


class KernelMemory:
    """What the modules keep of a batch, and a step over it; arguments as `heads.recurrent.Memory` takes them."""

    nowhere = -1
    """The slot of junk: the kernels write it nowhere."""

    def __init__(self, draft: KernelDraft, turns: tuple[Tensor, Tensor], batch_size: int) -> None:
        cos, sin = (table[0, 0] for table in turns)  # (S, d) each
        half = cos.shape[1] // 2
        self.draft = draft
        self.turns = cos.contiguous(), torch.cat([-sin[:, :half], sin[:, half:]], dim=1)
        self.caches = [module.layer.new_cache(batch_size=batch_size, capacity=len(cos)) for module in draft.modules]

    def start(self, taps: Tensor, hidden: Tensor) -> Tensor:
        """(B, W, L * D), (B, W, D) -> (B, W, D)."""
        rows = self.draft.start(taps.flatten(0, 1), hidden.flatten(0, 1))
        return rows.view(hidden.shape)

    def logits(self, recycled: Tensor, readout: Tensor) -> Tensor:
        """(B, W, D) -> (B, W, Vd)."""
        rows = self.draft.normed(recycled.flatten(0, 1))
        logits: Tensor = self.draft.output(rows).unflatten(0, recycled.shape[:2])
        return logits

    def step(
        self,
        module: int,
        embedding: Tensor,
        state: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor | None,
        extent: int,
    ) -> Tensor:
        """(B, W, D) -> the state to recycle (B, W, D)."""
        made, cache = self.draft.modules[module], self.caches[module]
        stream, given = made.enter(embedding.flatten(0, 1), state.flatten(0, 1))
        cache.aim(slots, extent=extent)
        mask = None if visible is None else additive(visible, torch.float32)
        made.layer.run(stream, cache, positions=positions, turns=self.turns, given=given, mask=mask)
        return made.leave(stream).view(state.shape)


def side_by_side(first: Norm, second: Norm) -> Callable[[Tensor, Tensor], Tensor]:
    """(R, D), (R, D) -> (R, 2 D), each normed."""

    def join(a: Tensor, b: Tensor) -> Tensor:
        R, D = a.shape
        out = a.new_empty(R, 2 * D)
        first.write(a, out[:, :D])
        second.write(b, out[:, D:])
        return out

    return join


def read_layer(attention: Any, mlp: Any, norm: nn.Module, input_norm: nn.Module | None = None) -> KernelStack | None:
    """A decoder layer of a head for the kernels; `input_norm` None where its input comes normed."""
    weight: Tensor = attention.q_proj.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or load() is None:
        return None
    block = (
        None if input_norm is None else Norm(input_norm),
        GroupedAttention(attention, "full_attention", shared=False),
        Norm(norm),
        GatedMLP(mlp, shared=False),
    )
    return KernelStack.of([block])
