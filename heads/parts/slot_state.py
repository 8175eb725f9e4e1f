"""State of a head that drafts with a cache of its own, and how a state follows the newest tokens.

Letters: B batch, T tokens of a step, M observed tokens, S cache slots, E visible slots, Hkv key-value heads, d head
dimension, D hidden, Vd draft vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heads.core.contract import Observation
from heads.core.tree import TreeShape
from heads.kernels.product import Product, ProductModule, with_products
from heads.kernels.slots import round_up
from heads.kernels.tree_attention import for_groups, masked_attention
from heads.parts.rotary import CosSin
from heads.targets.cache import Forms, KVCache


class SlotState:
    """Static tensors of one batch of sequences, for a head that drafts with a cache for each of its layers or modules.

    Slot p of the cache holds the key of one token; the last slot is for padding. Draft tokens use the slots after the
    observed ones; accepted tokens overwrite these slots later.
    """

    def __init__(
        self,
        head: Any,
        shape: TreeShape,
        *,
        batch_size: int,
        slots: int,
        layers: int,
        forms: Forms,
        lm_head_weight: Tensor,
        embed: Callable[[Tensor], Tensor],
    ) -> None:
        """`slots`: minimum number of slots; `layers`: layers with a cache."""
        weight = next(head.parameters())
        self.shape = shape
        self.embed = embed
        self.slot = torch.arange(round_up(slots), device=weight.device)  # (S,)
        self.root = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)
        self.length = torch.zeros_like(self.root)  # (B,), the root's position: slots before it are observed
        self.head = with_products(head, without="lm_head")
        self.lm_head = ProductModule(Product(lm_head_weight.to(weight.dtype)))  # (..., D) -> (..., Vd)
        self.cos_sin_table = torch.stack(head.cos_sin(self.slot[None], weight.dtype)).squeeze((1, 2))  # (2, S, d)
        self.cache = KVCache(
            num_layers=layers,
            batch_size=batch_size,
            capacity=len(self.slot),
            forms=forms,
            dtype=weight.dtype,
            device=weight.device,
        )

    def cos_sin(self, positions: Tensor) -> CosSin:
        """Return the rows (B, 1, T, d) of the tables for positions (B, T)."""
        rows = self.cos_sin_table.index_select(1, positions.flatten())
        cos, sin = rows.view(2, len(positions), 1, positions.shape[1], -1)
        return cos, sin

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, Hkv, T, d) to the slots that the cache has set. Return those of all visible slots,
        (B, E, Hkv, d)."""
        states = torch.cat([k.transpose(1, 2).flatten(2), v.transpose(1, 2).flatten(2)], dim=2)
        return self.cache.write(layer, states.flatten(0, 1))

    def attend(self, layer: int, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write a layer's keys and values, and attend to the visible slots. mask (B, T, E) is added to scores."""
        keys, values = self.write(layer, k, v)
        folded = for_groups(mask, q.shape[1] // k.shape[1])
        return masked_attention(q.transpose(1, 2), keys, values, folded).transpose(1, 2)

    def extent(self, tokens: int) -> int:
        """Return the number of slots that attention must read when `tokens` more follow the observed ones: all slots
        on a GPU, where the host would have to wait for the lengths."""
        if self.slot.device.type != "cpu":
            return len(self.slot)
        return min(round_up(int(self.length.max()) + tokens), len(self.slot))


def advance_root(state: Any, observation: Observation) -> None:
    """Set root and length (B,) of a state to those after an observation."""
    count = observation.count
    copy_last(state.root, observation.tokens[:, 1:], count)
    state.length.copy_(torch.where(count > 0, observation.start + count, state.length))


def copy_last(into: Tensor, rows: Tensor, count: Tensor) -> None:
    """Copy the last of the first `count` (B,) of rows (B, M, ...) to `into` (B, ...). Where the count is 0, nothing
    changes."""
    ones = [1] * (rows.ndim - 2)
    last = (count - 1).clamp_min(0).view(-1, 1, *ones).expand(-1, 1, *rows.shape[2:])
    into.copy_(torch.where((count > 0).view(-1, *ones), rows.gather(1, last)[:, 0], into))
