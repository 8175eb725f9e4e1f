"""Decoder layers and products of few rows on a CPU, in float32: kernels in C, compiled on first use where there is a
compiler.

A verify step multiplies 2 to 16 rows with every weight of the target. It ought to cost what one row costs, the time to
read the weights: how near it comes, `eval/bench.py --roofline` tells.

Letters: R rows, K inputs, O outputs.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from heads.backends.cpu.compiling import compiled, logger

SOURCES = ("layers.c", "products.c", "chains.c", "modules.c", "models.c", "slots.c", "kernels.h", "tiles.h")
SERIAL_WEIGHTS = 1 << 16
"""A matrix of fewer weights is not worth waking a second thread for."""
MOST_ROWS = 64
"""Products of more rows are arithmetic, where libraries are good."""

_POINTER, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64


class ProductStruct(ctypes.Structure):
    """`Product` of kernels.h."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("K", _INT), ("O", _INT), ("half", _INT))


class LayerStruct(ctypes.Structure):
    """`Layer` of kernels.h."""

    _fields_ = (
        *((name, ProductStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("attention_norm", "feedforward_norm", "head_norm")),
        *((name, _FLOAT) for name in ("attention_eps", "feedforward_eps", "head_eps", "scale")),
        *((name, _INT) for name in ("H", "Hkv", "d", "window")),
    )


class PassStruct(ctypes.Structure):
    """`Pass` of kernels.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "input", "cosines", "sines", "positions", "slots")),
        *((name, _POINTER) for name in ("mask", "near_mask", "scratch")),
        *((name, _INT) for name in ("B", "first_row", "N", "D", "E", "S", "threads")),
    )


class ModuleStruct(ctypes.Structure):
    """`Module` of modules.c."""

    _fields_ = (
        *(("layer", LayerStruct), ("project", ProductStruct), ("output", ProductStruct)),
        *((name, _POINTER) for name in ("token_norm", "state_norm", "leave_norm", "read_norm")),
        *((name, _FLOAT) for name in ("token_eps", "state_eps", "leave_eps", "read_eps")),
        *((name, _INT) for name in ("state_first", "zero_first")),
    )


class ModelStruct(ctypes.Structure):
    """`Model` of models.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("layers", "table", "norm")),
        *(("output", ProductStruct), ("count", _INT), ("eps", _FLOAT)),
    )


class ChainStruct(ctypes.Structure):
    """`Chain` of kernels.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("pick", "context", "kept", "root", "length", "logits", "logp")),
        *((name, _POINTER) for name in ("ids", "places", "slots", "tokens", "scores")),
        *((name, _INT) for name in ("depth", "V")),
    )


class PackedWeight:
    """A weight (O, K) and a bias (O,) or None, laid out for the kernels; copies. `half`: in bfloat16."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, *, half: bool = False) -> None:
        self.library, block = library, library.block_size()
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
    """The weight laid out for the kernels; None where it is of no use or cannot be had."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    library = load()
    return None if library is None else PackedWeight(library, weight, bias, half=half)


@cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be had, or are wrong."""
    library = compiled(*(Path(__file__).with_name(name) for name in SOURCES))
    if library is None:
        return None
    declare(library)
    with torch.random.fork_rng(devices=[]):
        x, weight, bias, residual = torch.randn(7, 300), torch.randn(70, 300), torch.randn(70), torch.randn(7, 70)
    if not PackedWeight(library, weight, bias)(x, residual).allclose(x @ weight.T + bias + residual, atol=1e-3):
        logger.warning("the compiled CPU kernels are wrong: torch's operations are used")
        return None
    return library


def declare(library: ctypes.CDLL) -> None:
    """The kernels' arguments."""
    library.multiply.argtypes = [_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, _INT]
    library.normalise_rows.argtypes = [_POINTER, _INT, _POINTER, _FLOAT, _POINTER, _INT, _INT, _INT]
    library.scratch_size.argtypes = [_POINTER, _INT, _INT, _INT, _INT]
    library.decoder_layers.argtypes = [
        *(_POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER)
    ]
    library.move_slots.argtypes, library.move_slots.restype = [*[_POINTER] * 5, *[_INT] * 6], None
    library.module_room.argtypes = [_POINTER, _INT, _INT, _INT, _INT]
    library.recycle.argtypes = [_POINTER] * 8
    library.read_out.argtypes = [_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT]
    library.draft_chain.argtypes = [_POINTER] * 8
    library.model_chain.argtypes = [*[_POINTER] * 5, _INT, _POINTER, _INT, _POINTER]
    library.advance.argtypes = [*[_POINTER] * 6, _INT, _INT]
    library.extend.argtypes = [_POINTER] * 14
    library.recycle.restype = library.read_out.restype = None
    library.draft_chain.restype = library.model_chain.restype = None
    library.extend.restype = library.advance.restype = None
    library.multiply.restype = library.normalise_rows.restype = library.decoder_layers.restype = None
    library.scratch_size.restype = library.module_room.restype = _INT
    library.block_size.restype = library.lanes.restype = ctypes.c_int
