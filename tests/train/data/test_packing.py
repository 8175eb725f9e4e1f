"""Packing: nothing lost, documents kept apart, and an order that needs no memory."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data.packing import PATTERN, Document, Mixture, Pool, best_fit, shares


def documents(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are all different; every third token is no label."""
    starts = np.cumsum([0, *lengths])
    return [
        Document(np.arange(start, start + length, dtype=np.int32), np.arange(start, start + length) % 3 > 0)
        for start, length in zip(starts, lengths, strict=False)
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(8, 20))
def test_every_token_is_packed_once_in_order_with_its_label(lengths: list[int], row_length: int) -> None:
    pool = Pool(documents(lengths), row_length)
    mixture = Mixture([pool], [1.0], seed=0)
    rows = mixture.rows(range(len(pool)))
    real = rows.documents >= 0
    assert sorted(rows.tokens[real].tolist()) == list(range(sum(lengths)))
    assert (rows.loss_mask[real] == (rows.tokens[real] % 3 > 0)).all() and not rows.loss_mask[~real].any()
    for row in range(len(pool)):
        for document in set(rows.documents[row].tolist()):
            where = rows.documents[row] == document
            if document >= 0:
                tokens, positions = rows.tokens[row][where], rows.positions[row][where]
                assert (tokens - tokens[0] == positions).all() and positions[0] == 0


def test_a_document_of_a_whole_row_is_not_cut() -> None:
    assert best_fit([5, 8, 3], 8) == [[(5, 8)], [(0, 5), (13, 3)]]


def test_packing_is_tight() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, size=2000).tolist()
    assert len(best_fit(lengths, 100)) * 100 < 1.02 * sum(lengths)


def test_an_epoch_shows_every_row_once_and_the_next_in_another_order() -> None:
    pool = Pool(documents([8] * 50), 8)
    mixture = Mixture([pool], [1.0], seed=1)
    epochs = [[mixture.locate(i)[1] for i in range(start, start + 50)] for start in (0, 50)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50)) and epochs[0] != epochs[1]


def test_the_order_is_a_function_of_seed_and_place() -> None:
    pools = [Pool(documents([8] * n), 8) for n in (7, 11)]
    a, b = (Mixture(pools, [1.0, 2.0], seed=3) for _ in range(2))
    forward = [a.locate(i) for i in range(3000)]
    assert [b.locate(i) for i in reversed(range(3000))] == forward[::-1]
    assert [Mixture(pools, [1.0, 2.0], seed=4).locate(i) for i in range(3000)] != forward


def test_pools_are_drawn_by_weight_and_each_evenly() -> None:
    pools = [Pool(documents([8] * n), 8) for n in (10, 20)]
    mixture = Mixture(pools, [0.3, 0.7], seed=0)
    drawn = Counter(mixture.locate(i) for i in range(2 * PATTERN))
    assert sum(count for (pool, _), count in drawn.items() if pool == 0) == 600
    assert {count for (pool, _), count in drawn.items() if pool == 0} == {60}
    assert {count for (pool, _), count in drawn.items() if pool == 1} == {70}


@pytest.mark.parametrize(("batch", "micros", "processes"), [(4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2)])
def test_a_step_sees_the_same_rows_however_it_is_cut_up(batch: int, micros: int, processes: int) -> None:
    mixture = Mixture([Pool(documents([8] * 30), 8)], [1.0], seed=0)
    seen = []
    for micro in range(micros):
        for process in range(processes):
            rows = mixture.batch(5, micro, process, batch_size=batch, num_micro=micros, num_processes=processes)
            seen += rows.tokens[:, 0].tolist()
    assert seen == mixture.rows(range(20, 24)).tokens[:, 0].tolist()


def test_label_counts_leave_out_what_is_masked() -> None:
    pool = Pool([Document(np.array([1, 2, 2, 3], dtype=np.int32), np.array([True, True, False, True]))], 8)
    assert Mixture([pool], [1.0], seed=0).label_counts(5).tolist() == [0, 1, 1, 1, 0]


def test_the_digest_sees_every_token_label_and_boundary() -> None:
    def digest(lengths: list[int], **change: int) -> str:
        docs = documents(lengths)
        if "token" in change:
            docs[0].ids[0] += 1
        if "label" in change:
            docs[0].labels[0] ^= True
        return Mixture([Pool(docs, change.get("row", 8))], [1.0], seed=change.get("seed", 0)).digest()

    whole = digest([5, 6])
    assert whole == digest([5, 6])
    others = [digest([5, 6], token=1), digest([5, 6], label=1), digest([6, 5]), digest([5, 6], row=16)]
    assert whole not in [*others, digest([5, 6], seed=1)]


def test_shares_add_up() -> None:
    assert shares([1, 1, 1], 10) == [4, 3, 3]
    assert shares([1e-9, 1.0], 100) == [1, 99]


def test_documents_that_are_not_packed_have_rows_of_their_own() -> None:
    pool = Pool(documents([3, 20, 5]), 8, packs=False)
    rows = Mixture([pool], [1.0], seed=0).rows(range(len(pool)))
    assert sorted((rows.documents >= 0).sum(1).tolist()) == [3, 4, 5, 8, 8] and rows.documents.max() == 0
    assert sorted(rows.tokens[rows.documents >= 0].tolist()) == list(range(28))
