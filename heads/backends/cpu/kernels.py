"""Products and norms of a few rows in float32 on a CPU, with weights packed for the kernels.

A verify step multiplies 2 to 16 rows by every weight of the target. Ideally it costs as much as one row, the time to
read the weights. `eval/bench.py --roofline` measures how close it comes.

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
"""Products with fewer weights use one thread, since waking another would cost more."""
MOST_ROWS = 64
"""Products with more rows are compute-bound, so torch's libraries compute them."""


class CompiledProduct(Product):
    """Product of a few rows in C, with a packed copy of the weight, in bfloat16 if `half`."""

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
        """Return the product (R, O) of x (R, K), plus the residual (R, O) if given. Each row of x must be
        contiguous."""
        if len(x) > MOST_ROWS:
            return super().__call__(x, residual)
        assert x.stride(1) == 1 and (residual is None or residual.is_contiguous())
        y = x.new_empty(len(x), len(self.weight))
        threads = torch.get_num_threads() if self.splits else 1
        added = None if residual is None else residual.data_ptr()
        self.library.multiply(self.reference, x.data_ptr(), x.stride(0), added, y.data_ptr(), len(x), threads)
        return y


class CompiledNorm(Norm):
    """RMS norm of rows in C."""

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
    """Return a part of a native decoder with its float32 products and norms in C. The weights of a `draft` are stored
    in bfloat16, which halves the bytes; the target verifies its output."""
    if isinstance(part, Product | Norm) and part.weight.dtype == torch.float32:
        return CompiledProduct(part, half=draft) if isinstance(part, Product) else CompiledNorm(part)
    if isinstance(part, GroupedAttention | LatentAttention | GatedMLP | Experts):
        made = copy.copy(part)
        draft = draft and isinstance(part, GroupedAttention | GatedMLP)
        vars(made).update({name: in_c(own, draft=draft) for name, own in vars(part).items()})
        return made
    return part


def draft_product(module: nn.Linear) -> Product:
    """Return a draft's product, in C if its weight is float32."""
    made: Product = in_c(Product.of(module, draft=True), draft=True)
    return made
