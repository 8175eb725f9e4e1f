"""The one library of C: its sources, the structs of `kernels.h` and every function that Python calls."""

import ctypes
from functools import cache
from pathlib import Path

from heads.backends.cpu.compiling import compiled

SOURCES = (
    *("layers.c", "products.c", "chains.c", "modules.c", "models.c", "slots.c", "draws.c", "commit.c"),
    *("kernels.h", "tiles.h"),
)
POINTER, FLOAT, INT = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
TYPES = {"p": POINTER, "f": FLOAT, "n": INT, "i": ctypes.c_int, "-": None}
FUNCTIONS = {
    # the result, then the arguments: p a pointer, n a whole number, f a float, - nothing
    "block_size": "i",
    "lanes": "i",
    "multiply": "-ppnppnn",
    "normalise_rows": "-pnpfpnnn",
    "scratch_size": "npnnnn",
    "decoder_layers": "-pnppnpnpnp",
    "move_slots": "-pppppnnnnnn",
    "module_room": "npnnnn",
    "recycle": "-pppppppp",
    "read_out": "-ppppnnn",
    "draft_chain": "-pppppppp",
    "extend": "-pppppppppppppp",
    "model_chain": "-pppppnpnp",
    "advance": "-ppppppnn",
    "gumbel": "-ppppnnn",
    "choose": "-pppppnnnn",
    "pick": "-ppppppnnnn",
    "commit": "-ppppn",
}


class ProductStruct(ctypes.Structure):
    """`Product`."""

    _fields_ = (("weight", POINTER), ("bias", POINTER), ("K", INT), ("O", INT), ("half", INT))


class ConvolutionStruct(ctypes.Structure):
    """`Convolution`."""

    _fields_ = (("project", ProductStruct), ("base", POINTER), ("taps", INT), ("groups", INT))


class LayerStruct(ctypes.Structure):
    """`Layer`."""

    _fields_ = (
        *((name, ProductStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ConvolutionStruct) for name in ("attention_conv", "feedforward_conv")),
        *((name, POINTER) for name in ("attention_norm", "feedforward_norm", "head_norm")),
        *((name, FLOAT) for name in ("attention_eps", "feedforward_eps", "head_eps", "scale")),
        *((name, INT) for name in ("H", "Hkv", "d", "window")),
    )


class PassStruct(ctypes.Structure):
    """`Pass`."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "input", "cosines", "sines", "positions", "slots")),
        *((name, POINTER) for name in ("mask", "near_mask", "scratch")),
        *((name, INT) for name in ("B", "first_row", "N", "D", "E", "S", "threads")),
    )


class ModuleStruct(ctypes.Structure):
    """`Module`."""

    _fields_ = (
        *(("layer", LayerStruct), ("project", ProductStruct), ("output", ProductStruct)),
        *((name, POINTER) for name in ("token_norm", "state_norm", "leave_norm", "read_norm")),
        *((name, FLOAT) for name in ("token_eps", "state_eps", "leave_eps", "read_eps")),
        *((name, INT) for name in ("state_first", "zero_first", "normed_residual")),
    )


class ModelStruct(ctypes.Structure):
    """`Model`."""

    _fields_ = (
        *((name, POINTER) for name in ("layers", "table", "norm")),
        *(("output", ProductStruct), ("count", INT), ("eps", FLOAT)),
    )


class SamplingStruct(ctypes.Structure):
    """`Sampling`."""

    _fields_ = (("temperatures", POINTER), ("seeds", POINTER), ("sharpness", ctypes.c_double))


class ChainStruct(ctypes.Structure):
    """`Chain`."""

    _fields_ = (
        ("sampling", SamplingStruct),
        *((name, POINTER) for name in ("kept", "root", "length", "logits", "logp")),
        *((name, POINTER) for name in ("ids", "positions", "slots", "tokens", "scores")),
        *((name, INT) for name in ("depth", "V")),
    )


class StateStruct(ctypes.Structure):
    """`State`."""

    _fields_ = (
        *((name, POINTER) for name in ("length", "root", "limit", "output", "output_length", "rounds", "accepted")),
        *((name, POINTER) for name in ("reached", "report", "done", "stops_at_eos", "eos", "tokens", "start", "count")),
        *((name, INT) for name in ("B", "M", "num_eos", "output_width", "record_width", "report_width")),
    )


@cache
def load() -> ctypes.CDLL | None:
    """The compiled library; None where there is no compiler."""
    library = compiled(*(Path(__file__).with_name(name) for name in SOURCES))
    if library is not None:
        for name, kinds in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, *function.argtypes = [TYPES[kind] for kind in kinds]
    return library


def loaded() -> ctypes.CDLL:
    """The compiled library, for what is made only where there is one."""
    library = load()
    assert library is not None
    return library
