"""Matrix products and norms of a native decoder, on rows of states.

Letters: R rows, K and O the inputs and outputs of a product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm


class Product:
    """x W^T + b, for one projection or for several of the same input side by side."""

    def __init__(self, *modules: nn.Linear) -> None:
        self.weight = fuse([module.weight for module in modules])  # (O, K)
        biases = [module.bias for module in modules]
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            self.bias = torch.cat(
                [torch.zeros_like(m.weight[:, 0]) if m.bias is None else m.bias.detach() for m in modules]
            )

    def __call__(self, x: Tensor) -> Tensor:
        """(R, K) -> (R, O)."""
        return linear(x, self.weight, self.bias)


def fuse(weights: Sequence[Tensor]) -> Tensor:
    """The weights (O_i, K) as one tensor, whose parts the modules go on using: they are kept once."""
    if len(weights) == 1:
        return weights[0].detach()
    fused = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, fused.split([len(weight) for weight in weights]), strict=True):
        weight.data = part
    return fused


class Norm:
    """x / rms(x) * weight."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach()
        self.eps = float(module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return (
            unit(x, self.eps) * self.weight
            if x.dtype == torch.float64
            else rms_norm(x, self.weight.shape, self.weight, self.eps)
        )


def unit(x: Tensor, eps: float) -> Tensor:
    """(..., D) -> x / rms(x), in float32 as the library's norms compute it, even on float64."""
    narrow = x.float()
    return (narrow * torch.rsqrt(narrow.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
