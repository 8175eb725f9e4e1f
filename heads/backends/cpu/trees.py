"""The nodes of a dynamic draft tree chosen by C, on a CPU: some twenty tensor operations a level as one call."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from heads.backends.cpu.compiling import compiled
from heads.backends.torch import select
from heads.backends.torch.select import MOST_CHILDREN, MOST_NODES, Beam, Nodes, first_node

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


def widen(
    nodes: Nodes, root: Tensor, beam: Beam | None, picked: Tensor, logp: Tensor, level: int, *, last: bool
) -> Beam | None:
    """As `heads.backends.torch.select.widen`."""
    library, (B, W, K), draws = load(), picked.shape, (picked, logp)
    if library is None or logp.dtype != torch.float32 or W * K > MOST_CHILDREN:
        return select.widen(nodes, root, beam, picked, logp, level, last=last)
    ids, paths = root.new_empty(3, B, K), root.new_empty(B, K, level)
    after = Beam(ids[0], logp.new_empty(B, K), ids[1], ids[2], paths)
    above = after if beam is None else beam
    held = [tensor.contiguous() for tensor in (root, above.nodes, above.paths, above.scores)]
    root_at, nodes_at, paths_at, scores_at = (tensor.data_ptr() for tensor in held)
    struct = LevelStruct(
        *(root_at, nodes_at, paths_at, picked.data_ptr(), scores_at, logp.data_ptr()),
        *(tensor.data_ptr() for tensor in (nodes.tokens, nodes.parents, nodes.places, nodes.scores)),
        *(tensor.data_ptr() for tensor in (after.tokens, after.nodes, after.rows, after.paths, after.scores)),
        *(B, W, K, nodes.tokens.shape[1], first_node(K, level), level, last),
        *((_INT * 3)(*tensor.stride()) for tensor in draws),
    )
    library.widen(ctypes.addressof(struct))
    return None if last else after


def prune(nodes: Nodes, penalties: Tensor, count: int) -> Nodes:
    """As `heads.backends.torch.select.prune`."""
    library, (B, T) = load(), nodes.tokens.shape
    if library is None or nodes.scores.dtype != torch.float32 or T > MOST_NODES:
        return select.prune(nodes, penalties, count)
    tokens, parents, places, depths = nodes.tokens.new_empty(4, B, count)
    kept = Nodes(tokens, parents, nodes.scores.new_empty(B, count), places, depths)
    given = nodes.tokens, nodes.parents, nodes.places, nodes.depths, nodes.scores, penalties
    held = [tensor.contiguous() for tensor in given]
    order, keys = torch.empty(T, dtype=torch.int64), torch.empty(T, dtype=torch.int32)
    made = tokens, parents, places, depths, kept.scores, order, keys
    struct = TreeStruct(*(tensor.data_ptr() for tensor in (*held, *made)), B, T, count)
    library.prune(ctypes.addressof(struct))
    return kept
