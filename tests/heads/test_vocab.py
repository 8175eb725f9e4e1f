"""The draft vocabulary: the commonest labels, never short, and refused where its two tables disagree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.errors import UserError
from heads.vocab import build_vocab, check_vocab, kept_ids


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.data())
def test_the_vocabulary_is_the_commonest_ids_ties_to_the_lowest(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    d2t, t2d = build_vocab(torch.tensor(counts), size)
    wanted = sorted(sorted(range(len(counts)), key=lambda token: (-counts[token], token))[:size])
    assert kept_ids(d2t).tolist() == wanted
    assert [i + offset for i, offset in enumerate(d2t.tolist())] == wanted  # as engines read it
    assert [token for token, kept in enumerate(t2d.tolist()) if kept] == wanted
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    check_vocab(d2t, t2d, size, len(counts))


def test_ids_that_were_never_counted_fill_it_up() -> None:
    counts = torch.zeros(10, dtype=torch.int64)
    counts[7] = 5
    assert kept_ids(build_vocab(counts, 4)[0]).tolist() == [0, 1, 2, 7]


def test_the_whole_vocabulary_has_offsets_of_zero() -> None:
    d2t, t2d = build_vocab(torch.randint(0, 5, (12,)), 12)
    assert not d2t.any() and t2d.all()


@pytest.mark.parametrize("size", [0, -1, 11])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(UserError, match=f"head.draft_vocab_size: expected 1 to 10 .* got {size}"):
        build_vocab(torch.zeros(10), size)


def test_tables_that_do_not_agree_are_refused() -> None:
    d2t, t2d = build_vocab(torch.tensor([0, 3, 0, 2, 0, 1, 0, 0]), 3)  # keeps 1, 3, 5
    assert d2t.tolist() == [1, 2, 3]
    moved = t2d.roll(1)
    more = t2d.clone()
    more[0] = True
    for bad_d2t, bad_t2d in (
        (d2t, moved),
        (d2t, more),
        (d2t, t2d[:-1]),
        (d2t, t2d.long()),
        (d2t[:-1], t2d),
        (d2t.int(), t2d),
        (d2t[None], t2d),
        (d2t - 2, t2d),  # -1, 1, 3
        (d2t + 3, t2d),  # 4, 6, 8: past the end
        (torch.tensor([1, 0, 3]), t2d),  # 1 twice
        (torch.tensor([3, 0, 3]), t2d),  # not ascending
        (kept_ids(d2t), t2d),  # absolute ids, as Medusa and FR-Spec write them
    ):
        with pytest.raises(UserError, match=r"^(d2t|t2d)") as caught:
            check_vocab(bad_d2t, bad_t2d, 3, 8)
        assert "\n" not in str(caught.value)
