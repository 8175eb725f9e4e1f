"""Packing: nothing lost, documents kept apart, and an order that needs no memory."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.corpus import Corpus, Document, corpus_of
from train.data.packing import PATTERN, Mixture, Pool, best_fit, cut_document, shares


def texts(lengths: list[int]) -> Corpus:
    """Documents whose tokens are all different, and labels."""
    starts = np.cumsum([0, *lengths])
    return corpus_of(
        Document(np.arange(start, start + length, dtype=np.int32), np.ones(length, dtype=np.bool_))
        for start, length in zip(starts, lengths, strict=False)
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(8, 20))
def test_every_token_of_a_text_is_packed_once_in_order(lengths: list[int], row_length: int) -> None:
    pool = Pool(texts(lengths), row_length)
    mixture = Mixture([pool], [1.0], seed=0)
    rows = mixture.rows(range(len(pool)))
    real = rows.documents >= 0
    assert sorted(rows.tokens[real].tolist()) == list(range(sum(lengths)))
    assert rows.loss_mask[real].all() and not rows.loss_mask[~real].any()
    for row in range(len(pool)):
        for document in set(rows.documents[row].tolist()):
            where = rows.documents[row] == document
            if document >= 0:
                tokens, positions = rows.tokens[row][where], rows.positions[row][where]
                assert (tokens - tokens[0] == positions).all() and positions[0] == 0


@st.composite
def talks(draw: st.DrawFn) -> list[bool]:
    """The labels of a conversation: prompts and answers in turn."""
    turns = draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8))
    return [label for prompt, answer in turns for label in [False] * prompt + [True] * answer]


@settings(deadline=None)
@given(st.lists(talks(), min_size=1, max_size=4), st.integers(8, 50))
def test_every_label_of_conversations_is_trained_on_once_where_it_stands(
    conversations: list[list[bool]], row_length: int
) -> None:
    """Tokens are their positions, so that each is seen to stand where it does in its conversation."""
    documents = [Document(np.arange(len(labels), dtype=np.int32), np.array(labels)) for labels in conversations]
    pool = Pool(corpus_of(documents), row_length)
    rows = Mixture([pool], [1.0], seed=0).rows(range(len(pool)))
    real = rows.documents >= 0
    assert (rows.tokens[real] == rows.positions[real]).all() and not rows.loss_mask[~real].any()
    trained = Counter(rows.tokens[rows.loss_mask].tolist())
    assert trained == Counter(n for labels in conversations for n, label in enumerate(labels) if label)


@settings(deadline=None)
@given(talks(), st.integers(8, 50))
def test_a_conversation_is_cut_behind_answers(labels: list[bool], row_length: int) -> None:
    behind = {n for n in range(1, len(labels) + 1) if labels[n - 1] and (n == len(labels) or not labels[n])}
    parts = list(cut_document(np.array(labels), row_length, len(labels)))
    for begin, end, position, context in parts:
        first = begin + context  # its own tokens
        following = min(n for n in behind if n > first)
        assert 0 < end - begin <= row_length and position == begin
        assert end in behind or end - begin == row_length < following - begin
        assert begin == 0 or begin in behind or context == row_length // 2 or following - begin == row_length
        # Half a row of what precedes, or from behind an answer in it, where that leaves room for the next one.
        assert begin == 0 or context or following - first == row_length or end - begin == row_length


def test_beyond_the_positions_of_the_target_nothing_is_trained_on() -> None:
    labels = np.array([False, False, True, True] * 10)
    parts = list(cut_document(labels, 8, 31))
    assert max(end for _, end, *_ in parts) == 31
    pool = Pool(corpus_of([Document(np.arange(40, dtype=np.int32), labels)]), 8, 31)
    assert pool.num_left_out == 5
    assert Pool(pool.corpus, 8).num_left_out == 0


def test_a_document_of_a_whole_row_is_not_cut() -> None:
    pool = Pool(texts([5, 8, 3]), 8)
    assert pool.pieces.tolist() == [[5, 8, 0, 0], [0, 5, 0, 0], [13, 3, 0, 0]] and pool.ends.tolist() == [1, 3]


def test_packing_is_tight() -> None:
    lengths = -np.sort(-np.random.default_rng(0).integers(1, 100, size=2000))
    rows = best_fit(lengths, 100)
    assert np.bincount(rows, lengths).max() <= 100 and (rows.max() + 1) * 100 < 1.02 * lengths.sum()


def test_an_epoch_shows_every_row_once_and_the_next_in_another_order() -> None:
    pool = Pool(texts([8] * 50), 8)
    mixture = Mixture([pool], [1.0], seed=1)
    epochs = [[mixture.locate(i)[1] for i in range(start, start + 50)] for start in (0, 50)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50)) and epochs[0] != epochs[1]


def test_the_order_is_a_function_of_seed_and_place() -> None:
    pools = [Pool(texts([8] * n), 8) for n in (7, 11)]
    a, b = (Mixture(pools, [1.0, 2.0], seed=3) for _ in range(2))
    forward = [a.locate(i) for i in range(3000)]
    assert [b.locate(i) for i in reversed(range(3000))] == forward[::-1]
    assert [Mixture(pools, [1.0, 2.0], seed=4).locate(i) for i in range(3000)] != forward


def test_pools_are_drawn_by_weight_and_each_evenly() -> None:
    pools = [Pool(texts([8] * n), 8) for n in (10, 20)]
    mixture = Mixture(pools, [0.3, 0.7], seed=0)
    drawn = Counter(mixture.locate(i) for i in range(2 * PATTERN))
    assert sum(count for (pool, _), count in drawn.items() if pool == 0) == 600
    assert {count for (pool, _), count in drawn.items() if pool == 0} == {60}
    assert {count for (pool, _), count in drawn.items() if pool == 1} == {70}


def test_label_counts_leave_out_what_is_masked() -> None:
    document = Document(np.array([1, 2, 2, 3], dtype=np.int32), np.array([True, True, False, True]))
    assert Mixture([Pool(corpus_of([document]), 8)], [1.0], seed=0).label_counts(5).tolist() == [0, 1, 1, 1, 0]


def test_the_digest_sees_every_token_label_and_boundary() -> None:
    def digest(lengths: list[int], **change: int) -> str:
        docs = [Document(np.arange(length, dtype=np.int32), np.arange(length) % 3 > 0) for length in lengths]
        if "token" in change:
            docs[0].ids[0] += 1
        if "label" in change:
            docs[0].labels[0] ^= True
        return Mixture([Pool(corpus_of(docs), change.get("row", 8))], [1.0], seed=change.get("seed", 0)).digest()

    whole = digest([5, 6])
    assert whole == digest([5, 6])
    others = [digest([5, 6], token=1), digest([5, 6], label=1), digest([6, 5]), digest([5, 6], row=16)]
    assert whole not in [*others, digest([5, 6], seed=1)]


def test_shares_add_up() -> None:
    assert shares([1, 1, 1], 10) == [4, 3, 3]
    assert shares([1e-9, 1.0], 100) == [1, 99]


def test_documents_that_are_not_packed_have_rows_of_their_own() -> None:
    pool = Pool(texts([3, 20, 5]), 8, packs=False)
    rows = Mixture([pool], [1.0], seed=0).rows(range(len(pool)))
    assert sorted((rows.documents >= 0).sum(1).tolist()) == [3, 4, 5, 8, 8] and rows.documents.max() == 0
    assert sorted(rows.tokens[rows.documents >= 0].tolist()) == list(range(28))
