"""Matrix products and norms of a native decoder, on rows of states.

Letters: R rows, K inputs and O outputs of a product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm


class Product:
    """x W^T + b, for one projection, or for several projections of the same input, concatenated."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight.detach(), bias  # (O, K), (O,)

    @classmethod
    def of(cls, *modules: nn.Linear, draft: bool = False) -> "Product":
        """Return the product of the modules. A target's modules then use slices of the fused weight, so that it is
        stored once. A draft's modules may be in training, so they keep their weights."""
        weight = fuse([module.weight for module in modules], shared=not draft)
        if all(module.bias is None for module in modules):
            return cls(weight)
        biases = [torch.zeros_like(m.weight[:, 0]) if m.bias is None else m.bias.detach() for m in modules]
        return cls(weight, torch.cat(biases))

    @property
    def weight_bytes(self) -> int:
        """Bytes read per weight."""
        return self.weight.element_size()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product (R, O) of x (R, K), plus the residual (R, O) if given."""
        y = linear(x, self.weight, self.bias)
        return y if residual is None else y.add_(residual)


def fuse(weights: Sequence[Tensor], *, shared: bool) -> Tensor:
    """Return the weights (O_i, K) as one tensor. If `shared`, the weights become slices of it."""
    if len(weights) == 1:
        return weights[0].detach()
    fused = torch.cat([weight.detach() for weight in weights])
    if not shared:
        return fused
    for weight, part in zip(weights, fused.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return fused


class Norm:
    """x / rms(x) * weight."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach()
        self.eps = float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if x.dtype == torch.float64:
            return unit(x, self.eps) * self.weight
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


def unit(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) for x (..., D), computed in float32 even for float64, as transformers' norms do."""
    narrow = x.float()
    return (narrow * torch.rsqrt(narrow.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
