"""Availability of the Triton kernels, `tree_attention` and `choose`.

Torch operations specify both, and run if no kernel can. In Triton's interpreter (TRITON_INTERPRET=1, set before triton
is imported), kernels also take CPU tensors, slowly, for tests.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from heads.core.errors import first_line

triton: Any = import_module("triton") if find_spec("triton") else None  # CPU builds of torch do not include it
tl: Any = import_module("triton.language") if find_spec("triton") else None

constexpr: Any = tl.constexpr if triton is not None else None
"""Annotation of a kernel's compile-time arguments."""

ON_CPU = False
"""True in tests that run kernels on a CPU in the interpreter."""
KERNEL_ERRORS: tuple[type[Exception], ...] = (RuntimeError, OSError, SubprocessError)
"""What a compiler, a driver or a card raises where a kernel cannot run. Other exceptions are faults of the program."""
if triton is not None:
    KERNEL_ERRORS += (import_module("triton.errors").TritonError,)


def runs_kernels(x: Tensor) -> bool:
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
        # An empty kernel is launched, since Triton also needs a C compiler and uses it only at the first launch.
        with torch.cuda.device(device):  # a kernel launches on the current device, not on that of its tensors
            _nothing[(1,)](torch.empty(1, device=device))
    except KERNEL_ERRORS as error:
        return f"Triton fails ({first_line(error)})"
    return None


def jit(function: object) -> Any:
    """Return `triton.jit` of a function, or the function itself without triton, where it is never called."""
    return triton.jit(function) if triton is not None else function


@jit
def _nothing(X):  # type: ignore[no-untyped-def]
    tl.store(X, 0.0)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
