"""The nodes of a dynamic draft tree chosen by C, on a CPU: some twenty tensor operations a level as one call."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from heads.backends.cpu.compiling import compiled

SOURCE = Path(__file__).with_name("trees.c")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class LevelStruct(ctypes.Structure):
    """`Level` of trees.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("root", "above_nodes", "above_paths", "picked", "above_scores", "logp")),
        *((name, _POINTER) for name in ("tokens", "parents", "places", "scores")),
        *((name, _POINTER) for name in ("next_tokens", "next_nodes", "next_rows", "next_paths", "next_scores")),
        *((name, _INT) for name in ("B", "W", "K", "T", "first", "level", "last")),
        *((name, _INT * 3) for name in ("picked_strides", "logp_strides")),
    )


class TreeStruct(ctypes.Structure):
    """`Tree` of trees.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("tokens", "parents", "places", "depths", "scores", "penalties")),
        *((name, _POINTER) for name in ("kept_tokens", "kept_parents", "kept_places", "kept_depths", "kept_scores")),
        *((name, _POINTER) for name in ("order", "keys")),
        *((name, _INT) for name in ("B", "T", "N")),
    )


@cache
def load() -> ctypes.CDLL | None:
    """The compiled functions; None where there is no compiler."""
    library = compiled(SOURCE)
    if library is not None:
        for function in (library.widen, library.prune):
            function.argtypes, function.restype = [_POINTER], None
    return library


def takes(scores: Tensor) -> bool:
    """Whether C can choose by these scores."""
    return scores.device.type == "cpu" and scores.dtype == torch.float32 and load() is not None


def widen(
    root: Tensor,
    above: tuple[Tensor, Tensor, Tensor],
    draws: tuple[Tensor, Tensor],
    nodes: tuple[Tensor, Tensor, Tensor, Tensor],
    after: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    first: int,
    level: int,
    *,
    last: bool,
) -> None:
    """As `heads.backends.triton.select.widen`: root (B,); nodes, paths and scores of the beam above; tokens and
    log-probabilities drawn (B, W, K); tokens, parents, places and scores (B, T) of the tree; tokens, nodes, rows, paths
    and scores of the next beam; `first` of the T is the first drawn."""
    library, (picked, logp), (B, W, K) = load(), draws, draws[0].shape
    assert library is not None
    held = [tensor.contiguous() for tensor in (root, *above)]
    root_at, nodes_at, paths_at, scores_at = (tensor.data_ptr() for tensor in held)
    struct = LevelStruct(
        *(root_at, nodes_at, paths_at, picked.data_ptr(), scores_at, logp.data_ptr()),
        *(tensor.data_ptr() for tensor in (*nodes, *after)),
        *(B, W, K, nodes[0].shape[1], first, level, last),
        *((_INT * 3)(*tensor.stride()) for tensor in draws),
    )
    library.widen(ctypes.addressof(struct))


def prune(
    nodes: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    penalties: Tensor,
    kept: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """As `heads.backends.triton.select.prune`: tokens, parents, places (B, T), depths (T,) and scores (B, T), penalties
    (T,); of the kept ones tokens, parents, places, depths and scores (B, N)."""
    library, (B, N), T = load(), kept[0].shape, len(penalties)
    assert library is not None
    held = [tensor.contiguous() for tensor in (*nodes, penalties)]
    order, keys = torch.empty(T, dtype=torch.int64), torch.empty(T, dtype=torch.int32)
    where = (tensor.data_ptr() for tensor in (*held, *kept, order, keys))
    struct = TreeStruct(*where, B, T, N)
    library.prune(ctypes.addressof(struct))
