"""Heads that recycle their state, with torch operations.

Letters: B batch, W tokens per row, D hidden, Vd draft vocabulary, S cache slots, E visible slots.
"""

import torch
from torch import Tensor

from heads.backends.base import RecurrentSpec, RecurrentSteps
from heads.backends.slot_mapping import Drafted, Observed
from heads.layers import masked_attention


class TorchRecurrent(RecurrentSteps):
    """Steps that call the same functions as training."""

    def __init__(self, spec: RecurrentSpec) -> None:
        head, cos_sin_table, batch_size = spec.head, spec.cos_sin_table, spec.batch_size
        self.head, self.embed, self.lm_head_weight = head, spec.embed, spec.lm_head_weight
        slots = cos_sin_table[0].shape[2]
        self.padding_slot = slots - 1  # no token that is read is ever in this slot
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
        """Return the number of heads and the width of a module's keys and of its values, as its block passes them to
        attention."""
        forms: list[tuple[int, int]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            forms.extend((x.shape[1], x.shape[3]) for x in (k, v))
            return q.new_zeros(*q.shape[:3], v.shape[3])

        nothing = next(self.head.parameters()).new_zeros(1, 1, self.head.config.hidden_size)
        self.head.step(module, nothing, nothing, cos_sin, attend)
        return forms[0], forms[1]

    def start(self, aux_hidden_states: Tensor, hidden: Tensor) -> Tensor:
        return self.head.start(aux_hidden_states, hidden)  # type: ignore[no-any-return]

    def normed(self, recycled: Tensor) -> Tensor:
        return self.head.normed(recycled)  # type: ignore[no-any-return]

    def logits(self, normed: Tensor) -> Tensor:
        return self.head.logits(normed, self.lm_head_weight)  # type: ignore[no-any-return]

    def step(
        self, module: int, tokens: Tensor, states: Tensor, rows: Tensor | None, mapping: Observed | Drafted, extent: int
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[module], self.values[module]
        positions, slots = mapping.positions, mapping.slots(self.padding_slot)
        visible = mapping.visible(module, extent)
        if visible is None:
            visible = self.slot[:extent] <= positions[..., None]
        if (window := self.head.sliding_window) is not None:  # draft tokens only appear nearer: slot >= position
            visible = visible & (positions[..., None] - self.slot[:extent] < window)
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
