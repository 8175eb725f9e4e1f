"""Whether Triton kernels can run.

Every kernel has a twin in torch operations, which is its specification and runs where the kernel cannot. In Triton's
interpreter (TRITON_INTERPRET=1, set before triton is imported) kernels take CPU tensors too, slowly, for tests.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

triton: Any = import_module("triton") if find_spec("triton") else None  # CPU builds of torch come without
tl: Any = import_module("triton.language") if find_spec("triton") else None

constexpr: Any = tl.constexpr if triton is not None else None
"""The annotation of a kernel's compile-time arguments."""

ON_CPU = False
"""Tests set it, under the interpreter."""


def runs_kernels(x: Tensor) -> bool:
    """Whether kernels can take tensors that live where `x` does."""
    return triton is not None and (x.is_cuda or ON_CPU)


def jit(function: Any) -> Any:
    """`triton.jit`, or the plain function where there is no triton: it is never called there."""
    return triton.jit(function) if triton is not None else function


def next_power_of_2(n: int) -> int:
    """The width of the tile that holds n columns."""
    return 1 << max(n - 1, 0).bit_length()
