"""Pending hidden states in C: what a round that drafted nothing leaves is kept in one call."""

import ctypes
from functools import cache
from pathlib import Path

from heads.backends.cpu.compiling import compiled

SOURCE = Path(__file__).with_name("pending.c")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class PendingStruct(ctypes.Structure):
    """`PendingStates` of pending hidden states.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("tokens", "count", "aux_hidden_states", "hidden")),
        *((name, _INT) for name in ("B", "S", "taps_size", "hidden_size")),
    )


@cache
def load() -> ctypes.CDLL | None:
    """The compiled function; None where there is no compiler."""
    library = compiled(SOURCE)
    if library is not None:
        library.keep.argtypes, library.keep.restype = [_POINTER] * 5, None
    return library
