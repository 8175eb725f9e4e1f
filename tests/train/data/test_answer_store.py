"""Answers on disk: found by their prompts, whatever ended the process that wrote them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from heads.errors import UserError
from tests.faults import small_files
from train.data.answer_store import HEADER, AnswerStore

ANSWERS = {(5, 6): [1], (7, 8, 9): [2, 3, 2**31 - 1], (4,): [5, 6, 7, 8]}


@contextmanager
def opened(folder: Path, writer: int | None = None, said: list[str] | None = None) -> Iterator[AnswerStore]:
    lines: list[str] = [] if said is None else said
    with AnswerStore(folder, lines.append, writer) as store:
        store.read()
        yield store


def write(folder: Path, writer: int = 0) -> Path:
    """Write ANSWERS to a log."""
    with opened(folder, writer) as store:
        for prompt, answer in ANSWERS.items():
            store.add(prompt, answer)
    return folder / f"{writer}.log"


def found(folder: Path) -> dict[tuple[int, ...], list[int]]:
    with opened(folder) as store:
        answers = {prompt: store.get(prompt) for prompt in ANSWERS}
    return {prompt: answer for prompt, answer in answers.items() if answer is not None}


def test_an_answer_is_kept_as_int32_for_every_number_of_processes(tmp_path: Path) -> None:
    log = write(tmp_path)
    assert log.stat().st_size == sum(HEADER.size + 4 * len(answer) for answer in ANSWERS.values())
    for writer in (0, 1, 2):
        with opened(tmp_path, writer) as store:
            assert all(store.get(prompt) == answer for prompt, answer in ANSWERS.items())
            store.add((5, 6), [9])  # the first answer stays
            store.add((writer,), [writer])
            assert store.get((writer,)) == [writer] and store.get((9, 9)) is None
    assert found(tmp_path) == ANSWERS


def test_a_log_cut_anywhere_loses_only_the_answer_that_was_being_written(tmp_path: Path) -> None:
    log = write(tmp_path)
    whole = log.read_bytes()
    last = HEADER.size + 4 * len(ANSWERS[4,])
    kept = {prompt: answer for prompt, answer in ANSWERS.items() if prompt != (4,)}
    for missing in range(1, last + 1):
        log.write_bytes(whole[:-missing])
        said: list[str] = []
        with opened(tmp_path, 0, said) as store:
            store.add((4,), ANSWERS[4,])
        assert log.read_bytes() == whole and len(said) == (missing < last)
        log.write_bytes(whole[:-missing])
        assert found(tmp_path) == kept  # to one who only reads


def test_a_damaged_answer_is_dropped_and_no_other(tmp_path: Path) -> None:
    log = write(tmp_path)
    data = bytearray(log.read_bytes())
    second = HEADER.size + 4 * len(ANSWERS[5, 6])
    data[second + HEADER.size] ^= 1
    log.write_bytes(data)
    assert found(tmp_path) == {prompt: answer for prompt, answer in ANSWERS.items() if prompt != (7, 8, 9)}
    said: list[str] = []
    with opened(tmp_path, 0, said) as store:
        store.add((7, 8, 9), ANSWERS[7, 8, 9])
    assert "0.log: 36 bytes are no whole answers" in said[0] and found(tmp_path) == ANSWERS


def test_two_runs_do_not_write_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path, 0), pytest.raises(UserError, match="another run has the same target answer"):
        AnswerStore(tmp_path, print, 0).__enter__()
    write(tmp_path)


def test_machines_that_do_not_share_the_folder_are_refused(tmp_path: Path) -> None:
    with AnswerStore(tmp_path, print, 1) as store, pytest.raises(UserError, match="do not share it; name a folder"):
        store.read(2)


def test_a_full_disk_keeps_the_answers_before(tmp_path: Path) -> None:
    log = write(tmp_path)
    whole = log.read_bytes()
    with opened(tmp_path, 0) as store, small_files(len(whole) + 40):
        with pytest.raises(UserError, match="cannot be written to"):
            store.add((1, 2, 3), list(range(50)))
        assert log.read_bytes() == whole and store.get((1, 2, 3)) is None
        store.add((1,), [1])
        assert store.get((1,)) == [1]
