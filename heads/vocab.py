"""The draft vocabulary: the target's most frequent labels, as the offsets and flags that engines read.

d2t (Vd,) int64: target id = draft id + d2t[draft id], ascending. t2d (V,) bool: True where a target id has a draft id.
A file has neither where the draft vocabulary is the target's whole: vLLM refuses one that has.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from heads.errors import UserError


def build_vocab(counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` most frequent ids by `counts` (V,), with ties to the lowest id. Ids with a count of 0 fill it
    up."""
    V = len(counts)
    if not 0 < size <= V:
        raise UserError(f"head.draft_vocab_size: expected 1 to {V} (the target's vocabulary), got {size}")
    return vocab_of(counts.sort(descending=True, stable=True).indices[:size].sort().values, V)


def vocab_of(kept: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the tables of the draft ids `kept` (Vd,), ascending target ids out of `size`: the inverse of
    `kept_ids`."""
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(len(kept)), t2d


def kept_ids(d2t: Tensor) -> Tensor:
    """(Vd,) the target id of each draft id."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def tables_to_save(d2t: Tensor, t2d: Tensor) -> dict[str, Tensor]:
    """Return the tables under their names in a head's file; none for a whole vocabulary."""
    return {} if len(d2t) == len(t2d) else {"d2t": d2t, "t2d": t2d}


def saved_tables(weights: Mapping[str, Tensor], draft_size: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the tables in a head's file of `draft_size` ids out of `size`: the inverse of `tables_to_save`."""
    if draft_size == size:
        return vocab_of(torch.arange(size), size)
    if absent := {"d2t", "t2d"} - weights.keys():
        raise UserError(f"lacks {min(absent)}; the draft vocabulary belongs inside the head")
    return weights["d2t"], weights["t2d"]


def check_vocab(d2t: Tensor, t2d: Tensor, draft_size: int, size: int) -> None:
    """Refuse tables that do not both describe the same `draft_size` ids out of `size`."""
    for name, table, shape, dtype in (("d2t", d2t, (draft_size,), torch.int64), ("t2d", t2d, (size,), torch.bool)):
        if table.shape != shape or table.dtype != dtype:
            raise UserError(f"{name}: expected {shape} {dtype}, got {tuple(table.shape)} {table.dtype}")
    ids = kept_ids(d2t)
    check_kept("d2t", ids, size)
    if not torch.equal(t2d.nonzero()[:, 0], ids):
        raise UserError(
            f"t2d marks {int(t2d.sum())} ids and d2t names {draft_size}: they must be the same ids; "
            "fetch or train it again"
        )


def check_kept(name: str, ids: Tensor, size: int) -> None:
    """Refuse ids (Vd,) of a draft vocabulary that are not ascending target ids out of `size`."""
    if not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= size:
        raise UserError(f"{name}: expected ascending target ids below {size}, got {ids.tolist()[:8]}...")
