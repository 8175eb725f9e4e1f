"""Availability of Triton kernels.

Every kernel is specified by torch operations: those of whole rounds run where no kernel can (`heads.backends.torch`),
the others are twins in tests.
In Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) kernels take CPU tensors too, slowly, for
tests.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from heads.errors import first_line

triton: Any = import_module("triton") if find_spec("triton") else None  # CPU builds of torch come without
tl: Any = import_module("triton.language") if find_spec("triton") else None

constexpr: Any = tl.constexpr if triton is not None else None
"""The annotation of a kernel's compile-time arguments."""

ON_CPU = False
"""Tests set it, under the interpreter."""


def runs_kernels(x: Tensor) -> bool:
    """Return True if kernels can take tensors on the device of `x`."""
    return triton is not None and (ON_CPU or (x.is_cuda and why_not(x.device) is None))


@cache
def why_not(device: torch.device) -> str | None:
    """Return the reason why kernels cannot run on a GPU, or None."""
    if triton is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"a GPU of compute capability {capability[0]}.{capability[1]} has no bfloat16; 8.0 has"
    try:
        launch_once(device)
    except Exception as error:  # of whatever kind, kernels are not to be had
        return f"Triton fails ({first_line(error)})"
    return None


def launch_once(device: torch.device) -> None:
    """Triton needs a C compiler, too, and asks for it at the first launch."""
    with torch.cuda.device(device):  # a kernel is launched on the current device, wherever its tensors are
        _nothing[(1,)](torch.empty(1, device=device))


def jit(function: Any, plain: Sequence[str] = ()) -> Any:
    """`triton.jit`, or the plain function where there is no triton: it is never called there. `plain`: numbers for
    whose being 1, or a multiple of 16, nothing is compiled anew."""
    return triton.jit(function, do_not_specialize=plain) if triton is not None else function


@jit
def _nothing(X):  # type: ignore[no-untyped-def]
    tl.store(X, 0.0)


def next_power_of_2(n: int) -> int:
    """The width of the tile that holds n columns."""
    return 1 << max(n - 1, 0).bit_length()
