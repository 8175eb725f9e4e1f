"""The acceptance rule `match` in C: all rows of a batch in one call."""

import ctypes
from functools import cache
from pathlib import Path

from torch import Tensor

from heads.backends.cpu.compiling import compiled
from heads.tree import Acceptance, Proposal

SOURCE = Path(__file__).with_name("accept.c")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


@cache
def load() -> ctypes.CDLL | None:
    """The compiled function; None where there is no compiler."""
    library = compiled(SOURCE)
    if library is not None:
        library.match.argtypes, library.match.restype = [*[_POINTER] * 7, *[_INT] * 3], None
        library.most_nodes.restype = ctypes.c_int
    return library


def match(proposal: Proposal, choice: Tensor, depth: int) -> Acceptance | None:
    """`eval.runtime.acceptance.match` of choice (B, N); None where the compiled function does not serve."""
    library, (B, N) = load() if choice.device.type == "cpu" else None, choice.shape
    if library is None or library.most_nodes() < N:
        return None
    made = choice.new_empty(B), choice.new_empty(B, depth + 1), choice.new_empty(B, depth + 1)
    given = [tensor.contiguous() for tensor in (proposal.tokens, proposal.parents, proposal.depths, choice)]
    library.match(*(tensor.data_ptr() for tensor in (*given, *made)), B, N, depth + 1)
    return Acceptance(*made)
