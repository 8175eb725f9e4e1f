"""Product of a few rows with a weight, and the norm before it: all that has an implementation of its own on a CPU.

A verify pass multiplies 2 to 16 rows by every weight of the target. Ideally it costs as much as one row, the time to
read the weights. torch's libraries pack a weight again for every call, which for so few rows costs several times the
arithmetic. So on a CPU weights are packed once: in C (`product.c`, compiled on first use) or, without a compiler, by
oneDNN. On other devices, in other dtypes and for many rows, `torch.nn.functional.linear` computes the product.

Letters: K inputs, O outputs.
"""

import copy
import ctypes
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm

from heads.core.errors import warn_once
from heads.kernels.compiled import compiled

SERIAL_WEIGHTS = 1 << 16
"""Products with fewer weights use one thread, since waking another would cost more."""
MAX_ROWS = 64
"""Products with more rows are compute-bound, so torch's libraries compute them."""


class Norm:
    """x / rms(x) * weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.detach()
        self.eps = eps

    @classmethod
    def of(cls, module: Any) -> Self:
        """Return the norm of a module, whose eps has one of two names."""
        return cls(module.weight, float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps))

    def __call__(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if x.dtype == torch.float64:
            return unit(x, self.eps) * self.weight
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


def unit(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) for x (..., D), computed in float32 even for float64, as transformers' norms do."""
    narrow = x.float()
    return (narrow * torch.rsqrt(narrow.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Product:
    """x W^T + b, for one projection, or for several projections of the same input, concatenated."""

    bytes_read = 0
    """Bytes of the weights that all products of this process have read so far."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight (O, K); bias (O,). On a CPU, a float32 weight is packed in bfloat16 if it loses nothing by it."""
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        is_float32_on_cpu = self.weight.device.type == "cpu" and self.weight.dtype == torch.float32
        self.library = load() if is_float32_on_cpu else None
        self.packed: Tensor | None = None
        if self.library is not None:
            half = self.weight.bfloat16()
            self.packed = _packed(self.library, half if torch.equal(half.float(), self.weight) else self.weight)
        elif is_float32_on_cpu and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)
        stored = self.weight if self.library is None or self.packed is None else self.packed
        self.bytes = self.weight.numel() * stored.element_size() + (0 if bias is None else bias.nbytes)

    @classmethod
    def of(cls, *modules: nn.Linear, draft: bool = False) -> "Product":
        """Return the product of the modules. A target's modules then use slices of the fused weight, so that it is
        stored once. A draft's modules may be in training, so they keep their weights."""
        weights = [module.weight for module in modules]
        weight = torch.cat([part.detach() for part in weights]) if len(weights) > 1 else weights[0].detach()
        if len(weights) > 1 and not draft:
            for part, own in zip(weights, weight.split([len(part) for part in weights]), strict=True):
                part.data = own
        if all(module.bias is None for module in modules):
            return cls(weight)
        biases = [torch.zeros_like(m.weight[:, 0]) if m.bias is None else m.bias.detach() for m in modules]
        return cls(weight, torch.cat(biases))

    def __call__(self, x: Tensor, residual: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        """Return the product (..., O) of x (..., K), after a norm if given, plus the residual (..., O) if given."""
        Product.bytes_read += self.bytes
        is_large = x.numel() > MAX_ROWS * x.shape[-1]
        if norm is not None and (self.library is None or is_large):
            x, norm = norm(x), None
        if self.packed is None or is_large:
            y = linear(x, self.weight, self.bias)
            return y if residual is None else y.add_(residual)
        if self.library is not None:
            return _multiply(self.library, self.packed, x, len(self.weight), self.bias, residual, norm)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out if residual is None else out.add_(residual)


class ProductModule(nn.Module):
    """Module that runs a product instead of a linear layer."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    @property
    def weight(self) -> Tensor:
        """The weight (O, K) of the linear layer that it replaces."""
        return self.product.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def with_products(module: Any, without: str | None = None) -> Any:
    """Return a copy of a draft's module that shares its parameters and has products, made from the current weights,
    instead of linear layers. Linear layers in the child `without` stay."""
    if isinstance(module, nn.Linear):
        return ProductModule(Product.of(module, draft=True))
    twin = copy.copy(module)
    twin._modules = {
        name: part if name == without or part is None else with_products(part) for name, part in module._modules.items()
    }
    return twin


@cache
def load() -> ctypes.CDLL | None:
    """Return the compiled C with `product.c`, or None if there is none or its products are wrong."""
    library = compiled()
    if library is None:
        return None
    library.multiply.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 5 + [ctypes.c_float]
    library.multiply.restype = None
    if not _is_right(library):
        warn_once("product.c, as compiled here, gives wrong products: oneDNN's are used, which are slower")
        return None
    return library


def _is_right(library: ctypes.CDLL) -> bool:
    """Return True if the library's products are torch's, for both widths of weights and more rows than a tile, of rows
    as they are and normed."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(13, 300, generator=draw)
    weight = torch.randn(129, 300, generator=draw)
    norm = Norm(torch.rand(300, generator=draw), 1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        packed = _packed(library, weight.to(dtype))
        wide = weight.to(dtype).float()
        for each in (None, norm):
            given = x if each is None else each(x)
            product = _multiply(library, packed, x, len(weight), norm=each)
            if not torch.allclose(product, given @ wide.T, atol=1e-3, rtol=0):
                return False
    return True


def _multiply(
    library: ctypes.CDLL,
    packed: Tensor,
    x: Tensor,
    outputs: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """Return the library's product (..., O) of x (..., K) with a weight from `_packed`."""
    x, inputs = x.contiguous(), x.shape[-1]
    rows = x.numel() // inputs
    assert residual is None or residual.is_contiguous()
    y = x.new_empty(*x.shape[:-1], outputs)
    normed = (None, None) if norm is None else (norm.weight, torch.empty_like(x))
    pointers = [None if t is None else t.data_ptr() for t in (packed, bias, x, residual, y, *normed)]
    half = packed.element_size() == 2
    threads = torch.get_num_threads() if inputs * outputs >= SERIAL_WEIGHTS else 1
    library.multiply(*pointers, inputs, outputs, rows, half, threads, 0.0 if norm is None else norm.eps)
    return y


def _packed(library: ctypes.CDLL, weight: Tensor) -> Tensor:
    """Return a weight (O, K) as blocks (O / block, K, block), the last one padded."""
    block = library.block_size()
    outputs, inputs = weight.shape
    return pad(weight, (0, 0, 0, -outputs % block)).view(-1, block, inputs).transpose(1, 2).contiguous()
