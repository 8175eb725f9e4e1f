"""The draft vocabulary: the target's most frequent labels. A head holds their ids, `kept` (Vd,) int64, ascending.

A head's file describes them by two tables, as engines read them, and by none where they are the target's whole
vocabulary: vLLM refuses a file that has tables then.

    d2t (Vd,) int64    target id = draft id + d2t[draft id]
    t2d (V,) bool      True where a target id has a draft id
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from heads.errors import UserError, expect


def build_vocab(counts: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent ids by `counts` (V,), ascending; ties go to the lowest id. Ids with a count of 0
    fill it up."""
    V = len(counts)
    expect(0 < size <= V, "head.draft_vocab_size", f"1 to {V} (the target's vocabulary)", size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def vocab_tables(kept: Tensor, size: int) -> dict[str, Tensor]:
    """Return the tables of the ids `kept` out of `size`, under their names in a head's file; none for all of them."""
    if len(kept) == size:
        return {}
    t2d = torch.zeros(size, dtype=torch.bool, device=kept.device)
    t2d[kept] = True
    return {"d2t": kept - torch.arange(len(kept), device=kept.device), "t2d": t2d}


def read_vocab(weights: Mapping[str, Tensor], draft_size: int, size: int) -> Tensor:
    """Return the `draft_size` ids out of `size` that a head's file describes. UserError where its tables are absent, of
    another form, or do not agree."""
    if draft_size == size:
        return torch.arange(size)
    for name, shape, dtype in (("d2t", (draft_size,), torch.int64), ("t2d", (size,), torch.bool)):
        check_table(weights, name, shape, dtype)
    kept = weights["d2t"] + torch.arange(draft_size)
    check_kept("d2t", kept, size)
    if not torch.equal(weights["t2d"].nonzero()[:, 0], kept):
        raise UserError(
            f"t2d marks {int(weights['t2d'].sum())} ids and d2t names {draft_size}: they must be the same ids; "
            "fetch or train it again"
        )
    return kept


def check_table(weights: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a file whose table of that name is absent or has another form."""
    table = weights.get(name)
    if table is None:
        raise UserError(f"lacks {name}; the draft vocabulary belongs inside the head")
    if table.shape != shape or table.dtype != dtype:
        raise UserError(f"{name}: expected {shape} {dtype}, got {tuple(table.shape)} {table.dtype}")


def check_kept(name: str, ids: Tensor, size: int) -> None:
    """Refuse ids (Vd,) of a draft vocabulary that are not ascending target ids out of `size`."""
    if not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= size:
        raise UserError(f"{name}: expected ascending target ids below {size}, got {ids.tolist()[:8]}...")
