"""What a head that recycles its state keeps of a batch, and a step over it: by torch's operations, by the kernels of a
CPU, or by those of a GPU.

Letters: B batch, W tokens of each, D hidden, Vd draft vocabulary, S cache slots, E of them shown.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heads.backends.cpu.recurrent import CpuRecurrent, compiled_draft
from heads.backends.slot_mapping import Drafted, Observed
from heads.backends.triton.recurrent import TritonRecurrent, triton_drafts
from heads.base import SharedLayers
from heads.layers import masked_attention
from heads.tree import TreeShape

if TYPE_CHECKING:
    from heads.recurrent import Recurrent


def open_memory(head: "Recurrent", shared: SharedLayers, *, batch_size: int, slots: int, shape: TreeShape) -> "Memory":
    """The fastest form that knows this head, where its weights are; of `slots` slots a row, for trees of `shape`."""
    weight = next(head.parameters())
    cos_sin_table = head.cos_sin(torch.arange(slots, device=weight.device)[None], weight.dtype)
    lm_head_weight = head.lm_head_weight(shared).to(weight.dtype)
    parts = head.parts()
    if parts is not None and parts.plain:
        if triton_drafts(parts):
            return TritonRecurrent(
                parts, shared.embed_tokens, lm_head_weight, cos_sin_table, batch_size=batch_size, shape=shape
            )
        draft = compiled_draft(parts, lm_head_weight)
        if draft is not None:
            return CpuRecurrent(draft, shared.embed_tokens, cos_sin_table, batch_size)
    return TorchRecurrent(head, shared, lm_head_weight, cos_sin_table, batch_size)


class TorchRecurrent:
    """By the very functions that training calls."""

    single = False
    """Whether it observes by itself."""

    def __init__(
        self,
        head: "Recurrent",
        shared: SharedLayers,
        lm_head_weight: Tensor,
        cos_sin_table: tuple[Tensor, Tensor],
        batch_size: int,
    ) -> None:
        self.head, self.embed, self.lm_head_weight = head, shared.embed_tokens, lm_head_weight  # (Vd, D)
        slots = cos_sin_table[0].shape[2]
        self.padding_slot = slots - 1  # the slot of padding: no token that is read ever stands there
        self.cos_sin_table = cos_sin_table[0][0, 0], cos_sin_table[1][0, 0]  # (S, d) each
        self.slot = torch.arange(slots, device=cos_sin_table[0].device)
        self.row = torch.arange(batch_size, device=cos_sin_table[0].device)[:, None]
        forms = [
            self._form((cos_sin_table[0][:, :, :1], cos_sin_table[1][:, :, :1]), module)
            for module in range(head.num_modules)
        ]
        new = next(head.parameters()).new_zeros
        self.keys = [new(batch_size, heads, slots, width) for (heads, width), _ in forms]
        self.values = [new(batch_size, heads, slots, width) for _, (heads, width) in forms]

    def _form(self, cos_sin: tuple[Tensor, Tensor], module: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and width of a module's keys, and of its values: whatever its block hands to attention."""
        forms: list[tuple[int, int]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            forms.extend((x.shape[1], x.shape[3]) for x in (k, v))
            return q.new_zeros(*q.shape[:3], v.shape[3])

        nothing = next(self.head.parameters()).new_zeros(1, 1, self.head.config.hidden_size)
        self.head.step(module, nothing, nothing, cos_sin, attend)
        return forms[0], forms[1]

    def start(self, aux_hidden_states: Tensor, hidden: Tensor) -> Tensor:
        """(B, W, L * D), (B, W, D) -> the state that the first step recycles (B, W, D)."""
        return self.head.start(aux_hidden_states, hidden)

    def normed(self, recycled: Tensor) -> Tensor:
        """What the output head reads of a recycled state."""
        return self.head.normed(recycled)

    def logits(self, normed: Tensor) -> Tensor:
        """(B, W, D) -> (B, W, Vd)."""
        return self.head.logits(normed, self.lm_head_weight)

    def step(
        self,
        module: int,
        tokens: Tensor,
        states: Tensor,
        rows: Tensor | None,
        places: Observed | Drafted,
        extent: int,
    ) -> tuple[Tensor, Tensor]:
        """One step: tokens (B, W) at their places, each beside a state (B, W', D), row `rows` (B, W) of them or its
        own; sees of the first `extent` slots. -> the states to recycle, and what the output head reads, (B, W, D)."""
        keys, values = self.keys[module], self.values[module]
        positions, slots = places.positions, places.slots(self.padding_slot)
        visible = places.visible(module, extent)
        if visible is None:
            visible = self.slot[:extent] <= positions[..., None]
        if rows is not None:
            states = states.gather(1, rows[..., None].expand(-1, -1, states.shape[2]))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[self.row, :, slots] = k.transpose(1, 2)
            values[self.row, :, slots] = v.transpose(1, 2)
            return masked_attention(q, keys[:, :, :extent], values[:, :, :extent], visible)

        cos_sin = self.cos_sin_table[0][positions][:, None], self.cos_sin_table[1][positions][:, None]
        embedding = self.head.masked(self.embed(tokens), positions)
        made = self.head.step(module, embedding, states, cos_sin, attend)
        return made, self.head.normed(made)


Memory = TorchRecurrent | CpuRecurrent | TritonRecurrent
"""Any of the forms."""
