"""The rule by which tests compare floats that two computations round differently."""

import torch
from torch import Tensor


def assert_close(
    got: Tensor,
    want: Tensor,
    *,
    roundings: int = 64,
    scale: float | None = None,
    precision: torch.dtype | None = None,
) -> None:
    """Assert that `got` is `want` up to rounding, on any processor.

    A sum is off by some eps times the size of its terms, whatever its own size; how many depends on the order of the
    additions, which the processor decides. An element near 0 is often a difference of large terms, so the tolerance is
    the same for all elements: `roundings` * eps * `scale`.

    roundings: of one sum some 16, of a few layers 64, of a whole model hundreds: ten times what was seen with SSE, AVX2
    and AVX-512. A token too many or another factor are a hundred times what even 1024 allow.
    scale: size of what is summed; default: the largest finite element of `want`, which is to be computed in float64
    where that is possible.
    precision: the dtype whose eps counts. Default: float64 if both are, else float32. Tensors of float64 may come from
    tables in float32. A result in 16 bits is rounded once more.
    """
    exact = want.detach().double()
    if precision is None:
        precision = torch.float64 if got.dtype == want.dtype == torch.float64 else torch.float32
    if scale is None:
        scale = float(exact[exact.isfinite()].abs().max())
    last = torch.finfo(got.dtype).eps if got.dtype.itemsize == 2 else 0.0
    tolerance = roundings * torch.finfo(precision).eps * scale
    torch.testing.assert_close(got.detach().double(), exact, atol=tolerance, rtol=last)
