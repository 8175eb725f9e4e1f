"""Noise and choices on a CPU in C: what `eval.runtime.sampling` does with tensor operations, one pass over each row.

In float64 operations the noise of one row of 4,096 ids takes longer than the quickstart's head does for a token. All
here return None where C does not serve, and then the tensor operations do; the two give the same to the bit, but for
one value of the noise in some hundred millions.

Letters: B rows, W positions a row, V columns of the logits.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from heads.native.compiling import compiled

SOURCE = Path(__file__).with_name("draws.c")
SERIAL_VALUES = 1 << 16
"""Noise for fewer ids is not worth waking a second thread for."""


@cache
def load() -> ctypes.CDLL | None:
    """The compiled functions; None where there is no compiler."""
    library = compiled(SOURCE)
    if library is not None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        library.draws_room.argtypes, library.draws_room.restype = [integer], integer
        library.gumbel.argtypes = [*[pointer] * 5, *[integer] * 3]
        library.choose.argtypes = [*[pointer] * 6, *[integer] * 4]
        library.pick.argtypes = [*[pointer] * 8, *[integer] * 4]
        library.gumbel.restype = library.choose.restype = library.pick.restype = None
    return library


def library_for(like: Tensor) -> ctypes.CDLL | None:
    """What takes tensors of this device."""
    return load() if like.device.type == "cpu" else None


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor | None:
    """As `eval.runtime.sampling.gumbel`: seeds (B,), positions (B, W), token_ids (V,) -> (B, W, V) float32."""
    library = library_for(seeds)
    if library is None:
        return None
    (B, W), V = positions.shape, len(token_ids)
    held = seeds.contiguous(), positions.contiguous(), token_ids.contiguous()
    noise = torch.empty(B, W, V)
    room = torch.empty(library.draws_room(V))
    library.gumbel(*(x.data_ptr() for x in (*held, room, noise)), B, W, V)
    return noise


def choose(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor | None:
    """The choice of rows that filter nothing: logits (B, W, V) float32, temperature and seeds (B,), positions (B, W) of
    the tokens to be chosen -> (B, W) ids. A row at temperature 0 gets its argmax."""
    library = library_for(logits)
    if library is None or logits.dtype != torch.float32:
        return None
    B, W, V = logits.shape
    threads = torch.get_num_threads() if B * W * V >= SERIAL_VALUES else 1
    logits, positions = logits.contiguous(), positions.contiguous()
    chosen = torch.empty_like(positions)
    room = torch.empty(threads * library.draws_room(V))
    tensors = logits, temperature, seeds, positions, room, chosen
    library.choose(*(x.data_ptr() for x in tensors), B, W, V, threads)
    return chosen


def pick(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, count: int, token_ids: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """As `RowSampling.pick`: logits (B, W, V) float32 -> ids (B, W, count), log-probabilities (B, W, count)."""
    library = library_for(logits)
    if library is None or logits.dtype != torch.float32:
        return None
    B, W, V = logits.shape
    logits, positions = logits.contiguous(), positions.contiguous()
    picked, logp = positions.new_empty(B, W, count), logits.new_empty(B, W, count)
    room = torch.empty(library.draws_room(V))
    ids = None if token_ids is None else token_ids.data_ptr()
    before = (x.data_ptr() for x in (logits, temperature, seeds, positions))
    library.pick(*before, ids, room.data_ptr(), picked.data_ptr(), logp.data_ptr(), B, W, V, count)
    return picked, logp
