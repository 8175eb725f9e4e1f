"""Products and norms of few rows on a CPU, in float32, with weights laid out for the kernels.

A verify step multiplies 2 to 16 rows with every weight of the target. It ought to cost what one row costs, the time to
read the weights: how near it comes, `eval/bench.py --roofline` tells.

Letters: R rows, K inputs, O outputs.
"""

import copy
import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from heads.backends.cpu.library import STRUCTS, loaded
from heads.backends.torch.attention import GroupedAttention, LatentAttention
from heads.backends.torch.feedforward import Experts, GatedMLP
from heads.backends.torch.linear import Norm, Product

SERIAL_WEIGHTS = 1 << 16
"""A matrix of fewer weights is not worth waking a second thread for."""
MOST_ROWS = 64
"""Products of more rows are arithmetic, where libraries are good."""


class CompiledProduct(Product):
    """Few rows by C, with a copy of the weight; `half`: in bfloat16."""

    def __init__(self, product: Product, *, half: bool = False) -> None:
        super().__init__(product.weight, product.bias)
        self.library = loaded()
        block, (outputs, inputs) = self.library.block_size(), self.weight.shape
        padded = pad(self.weight.bfloat16() if half else self.weight, (0, 0, 0, -outputs % block))
        self.packed = padded.view(-1, block, inputs).transpose(1, 2).contiguous()
        self.addend = None if self.bias is None else self.bias.detach().float().contiguous()
        where = self.packed.data_ptr(), None if self.addend is None else self.addend.data_ptr()
        self.struct = STRUCTS["Product"](*where, inputs, outputs, half)
        self.reference = ctypes.byref(self.struct)
        self.splits = self.weight.numel() >= SERIAL_WEIGHTS

    @property
    def weight_bytes(self) -> int:
        return self.packed.element_size()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (R, K), whose rows lie without gaps in themselves -> (R, O), the residual (R, O) added."""
        if len(x) > MOST_ROWS:
            return super().__call__(x, residual)
        assert x.stride(1) == 1 and (residual is None or residual.is_contiguous())
        y = x.new_empty(len(x), len(self.weight))
        threads = torch.get_num_threads() if self.splits else 1
        added = None if residual is None else residual.data_ptr()
        self.library.multiply(self.reference, x.data_ptr(), x.stride(0), added, y.data_ptr(), len(x), threads)
        return y


class CompiledNorm(Norm):
    """Rows by C."""

    def __init__(self, norm: Norm) -> None:
        self.weight, self.eps, self.library = norm.weight, norm.eps, loaded()

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.stride(1) != 1:
            return super().__call__(x)
        y = torch.empty_like(x)
        self.library.normalise_rows(
            x.data_ptr(), x.stride(0), self.weight.data_ptr(), self.eps, y.data_ptr(), y.stride(0), *x.shape
        )
        return y


def in_c(part: Any, *, draft: bool = False) -> Any:
    """A part of a native decoder with its products and norms in C, those in float32; a `draft`'s weights are held in
    bfloat16, half the bytes: the target judges what they give."""
    if isinstance(part, Product | Norm) and part.weight.dtype == torch.float32:
        return CompiledProduct(part, half=draft) if isinstance(part, Product) else CompiledNorm(part)
    if isinstance(part, GroupedAttention | LatentAttention | GatedMLP | Experts):
        made = copy.copy(part)
        draft = draft and isinstance(part, GroupedAttention | GatedMLP)
        vars(made).update({name: in_c(own, draft=draft) for name, own in vars(part).items()})
        return made
    return part


def draft_product(module: nn.Linear) -> Product:
    """A draft's product, in C where it is in float32."""
    made: Product = in_c(Product.of(module, draft=True), draft=True)
    return made
