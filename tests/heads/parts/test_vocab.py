"""The draft vocabulary: the commonest labels, never short, and refused where its two tables disagree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heads.parts.vocab import build_vocab, read_vocab, vocab_tables
from tests.support.refusals import refused


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.data())
def test_the_vocabulary_is_the_commonest_ids_ties_to_the_lowest(counts: list[int], data: st.DataObject) -> None:
    V = len(counts)
    size = data.draw(st.integers(1, V))
    kept = build_vocab(torch.tensor(counts), size)
    wanted = sorted(sorted(range(V), key=lambda token: (-counts[token], token))[:size])
    assert kept.tolist() == wanted and kept.dtype == torch.int64
    tables = vocab_tables(kept, V)
    assert bool(tables) == (size < V)  # the whole vocabulary needs none
    if tables:  # as engines read them
        assert [i + offset for i, offset in enumerate(tables["d2t"].tolist())] == wanted
        assert [token for token, known in enumerate(tables["t2d"].tolist()) if known] == wanted
    assert torch.equal(read_vocab(tables, size, V), kept)


D2T, T2D = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0, 1, 0, 1, 0, 0]).bool()  # 1, 3, 5 of 8 ids


@pytest.mark.parametrize(
    ("d2t", "t2d"),
    [
        (D2T, T2D.roll(1)),
        (D2T, T2D[:-1]),
        (D2T, None),
        (None, T2D),
        (D2T[:-1], T2D),
        (D2T - 2, T2D),  # -1, 1, 3
        (D2T + 3, T2D),  # 4, 6, 8: past the end
        (torch.tensor([1, 0, 3]), T2D),  # 1 twice
        (torch.tensor([1, 3, 5]), T2D),  # absolute ids, as Medusa and FR-Spec write them
    ],
)
def test_tables_that_do_not_agree_are_refused(d2t: Tensor | None, t2d: Tensor | None) -> None:
    assert read_vocab({"d2t": D2T, "t2d": T2D}, 3, 8).tolist() == [1, 3, 5]
    tables = {name: table for name, table in (("d2t", d2t), ("t2d", t2d)) if table is not None}
    assert refused(read_vocab, tables, 3, 8).removeprefix("lacks ").startswith(("d2t", "t2d"))
