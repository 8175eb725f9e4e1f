"""Products of few rows on a CPU, in float32, with weights laid out for the kernels.

A verify step multiplies 2 to 16 rows with every weight of the target. It ought to cost what one row costs, the time to
read the weights: how near it comes, `eval/bench.py --roofline` tells.

Letters: R rows, K inputs, O outputs.
"""

import ctypes

import torch
from torch import Tensor

from heads.backends.cpu.library import ProductStruct, loaded

SERIAL_WEIGHTS = 1 << 16
"""A matrix of fewer weights is not worth waking a second thread for."""
MOST_ROWS = 64
"""Products of more rows are arithmetic, where libraries are good."""


class PackedWeight:
    """A weight (O, K) and a bias (O,) or None, laid out for the kernels; copies. `half`: in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, half: bool = False) -> None:
        self.library = loaded()
        block = self.library.block_size()
        self.O, self.K = weight.shape
        weight = weight.detach().bfloat16() if half else weight.detach()
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -self.O % block))
        self.weight = padded.view(-1, block, self.K).transpose(1, 2).contiguous()
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.struct = ProductStruct(
            self.weight.data_ptr(), None if self.bias is None else self.bias.data_ptr(), self.K, self.O, half
        )
        self.reference = ctypes.byref(self.struct)
        self.splits = weight.numel() >= SERIAL_WEIGHTS

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (R, K), whose rows lie without gaps in themselves -> (R, O), the residual (R, O) added."""
        assert x.stride(1) == 1 and (residual is None or residual.is_contiguous())
        y = x.new_empty(len(x), self.O)
        threads = torch.get_num_threads() if self.splits else 1
        added = None if residual is None else residual.data_ptr()
        self.library.multiply(self.reference, x.data_ptr(), x.stride(0), added, y.data_ptr(), len(x), threads)
        return y


def pack(weight: Tensor, bias: Tensor | None = None, *, half: bool = False) -> PackedWeight | None:
    """The weight laid out for the kernels; None where they are not for its dtype."""
    return PackedWeight(weight, bias, half=half) if weight.dtype == torch.float32 else None
