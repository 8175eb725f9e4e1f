"""Heads that draft a block, with torch operations.

Letters: B batch, M observed tokens, R rows of a block, L auxiliary layers, D hidden, V vocabulary, E visible slots.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from heads.backends.base import BlockSpec, BlockSteps
from heads.backends.slot_mapping import Observed
from heads.layers import Attend, masked_attention


class ProductModule(nn.Module):
    """Module that runs a backend's product instead of a linear layer."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def with_products(module: Any, product: Callable[[nn.Linear], Any], without: str | None = None) -> Any:
    """Return a copy of a module that shares its parameters and has a backend's products, made from the current weights,
    instead of linear layers. Linear layers in the child `without` stay."""
    if isinstance(module, nn.Linear):
        return ProductModule(product(module))
    twin = copy.copy(module)
    twin._modules = {
        name: part if name == without else with_products(part, product) for name, part in module.named_children()
    }
    return twin


def output_head(spec: BlockSpec) -> ProductModule:
    """Return the output head as the backend's product."""
    weight = spec.lm_head_weight
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return ProductModule(spec.product(made))


class TorchBlock(BlockSteps):
    """Steps that call the same functions as training."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(spec)
        self.head = with_products(spec.head, spec.product)
        self.lm_head = output_head(spec)
        config, new = spec.head.config, spec.lm_head_weight.new_zeros
        form = (spec.batch_size, config.num_key_value_heads, len(spec.cos_sin_table[0]), config.head_dim)
        self.keys, self.values = ([new(form) for _ in self.head.layers] for _ in range(2))

    def extend(self, aux_hidden_states: Tensor, mapping: Observed) -> None:
        slots, cos_sin = self.slots(mapping), self.cos_sin(mapping.positions)
        context = self.head.fuse(aux_hidden_states)  # (B, M, D)
        for layer, keys, values in zip(self.head.layers, self.keys, self.values, strict=True):
            k, v = layer.self_attn.keys(context, cos_sin)
            keys[self.row, :, slots] = k.transpose(1, 2)
            values[self.row, :, slots] = v.transpose(1, 2)

    def run(self, x: Tensor, positions: Tensor, visible: Sequence[Tensor]) -> Tensor:
        extent = visible[0].shape[2]

        def attend_by(keys: Tensor, values: Tensor, seen: Tensor) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys[self.row, :, positions] = k.transpose(1, 2)
                values[self.row, :, positions] = v.transpose(1, 2)
                return masked_attention(q, keys[:, :, :extent], values[:, :, :extent], seen)

            return attend

        attends = [attend_by(*cache) for cache in zip(self.keys, self.values, visible, strict=True)]
        made: Tensor = self.head.run(x, self.cos_sin(positions), attends, x.shape[1])
        return made
