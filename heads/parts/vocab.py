"""Draft vocabulary: the most frequent labels. A head holds `draft_to_target` (Vd,) int64, their target ids, ascending.

A head's file describes it with the two tables that engines read. If it is the target's whole vocabulary the file has
none, because vLLM refuses tables then.

    d2t (Vd,) int64    target id = draft id + d2t[draft id]
    t2d (V,) bool      True where a target id has a draft id
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from heads.core.errors import UserError, expect


def build_vocab(counts: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent ids by `counts` (V,), ascending; ties go to the lowest id. Ids with a count of 0
    are included if there are too few others."""
    V = len(counts)
    expect(0 < size <= V, "head.draft_vocab_size", f"1 to {V} (the target's vocabulary)", size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def vocab_tables(draft_to_target: Tensor, size: int) -> dict[str, Tensor]:
    """Return the tables of a draft vocabulary out of `size` ids, under their names in a head's file; none if it has all
    ids."""
    if len(draft_to_target) == size:
        return {}
    t2d = torch.zeros(size, dtype=torch.bool, device=draft_to_target.device)
    t2d[draft_to_target] = True
    return {"d2t": draft_to_target - torch.arange(len(draft_to_target), device=draft_to_target.device), "t2d": t2d}


def read_vocab(weights: Mapping[str, Tensor], draft_size: int, size: int) -> Tensor:
    """Return the `draft_size` ids out of `size` that a head's file describes. Raises UserError if its tables are
    absent, have another form, or disagree."""
    if draft_size == size:
        return torch.arange(size)
    for name, shape, dtype in (("d2t", (draft_size,), torch.int64), ("t2d", (size,), torch.bool)):
        check_table(weights, name, shape, dtype)
    draft_to_target = weights["d2t"] + torch.arange(draft_size)
    if not torch.equal(weights["t2d"].nonzero()[:, 0], draft_to_target):
        raise UserError(
            f"t2d marks {int(weights['t2d'].sum())} ids and d2t names {draft_size}: they must be the same ids; "
            "fetch or train it again"
        )
    return draft_to_target


def check_table(weights: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise UserError if the file's table `name` is absent or has another form."""
    table = weights.get(name)
    if table is None:
        raise UserError(f"lacks {name}; the draft vocabulary belongs inside the head")
    if table.shape != shape or table.dtype != dtype:
        raise UserError(f"{name}: expected {shape} {dtype}, got {tuple(table.shape)} {table.dtype}")
