"""Formulas for `DraftHead.step_cost`: operations of products, and bytes that a layer keeps for its backward pass.

A matrix of n numbers takes 2 n FLOP a row forward, and as many for each of the gradients of its input and, if it is
trained, of itself. A layer keeps, of each row, the inputs of its norms, of its products and of SiLU, and the queries,
keys, values and output of its attention.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from heads.targets.families import attention_widths, layer_setting

ATTENTION_PRODUCTS = 7
"""Products as large as that of queries and keys in an attention: 2 forward, 1 computed again, 4 backward."""


def flops(*modules: nn.Module) -> int:
    """Return the operations of a row's products with the linear layers of modules, and of their gradients."""
    weights = [part.weight for module in modules for part in module.modules() if isinstance(part, nn.Linear)]
    return sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights)


@dataclass(frozen=True)
class Widths:
    """Widths of a layer: of its states, of its feed-forward part, of all queries and of all keys."""

    hidden: int
    inner: int
    queries: int
    keys: int

    @classmethod
    def of(cls, config: Any) -> "Widths":
        width, _, heads, key_heads = attention_widths(config, config.hidden_size)
        inner = layer_setting(config, "intermediate_size") or 4 * config.hidden_size
        return cls(config.hidden_size, inner, heads * width, key_heads * width)

    def kept(self, states: int, queries: int, keys: int) -> int:
        """Return the numbers that a layer keeps of a row, given how many of each width."""
        return states * self.hidden + queries * self.queries + keys * self.keys + 4 * self.inner
