"""The cache: tokens are mapped as they were written, and answers are found by their prompts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from heads.core.errors import UserError
from tests.chats import reader_of
from tests.faults import small_files
from train.data import sources
from train.data.corpus import (
    AnswerStore,
    Corpus,
    Document,
    Tally,
    cache_root,
    corpus_of,
    has_documents,
    stored_documents,
)
from train.data.sources import ChatSource, TextSource, read_source

pytestmark = pytest.mark.usefixtures("own_cache")


def some(lengths: list[int]) -> list[Document]:
    rng = np.random.default_rng(0)
    return [Document(rng.integers(0, 99, length).astype(np.int32), rng.random(length) < 0.5) for length in lengths]


def never() -> list[Document]:
    raise AssertionError("documents that are in the cache are not made again")


def test_what_is_mapped_is_what_was_written() -> None:
    documents = some([3, 300_000, 1, *[40] * 3000])
    odd = Document.of([], [], reason="odd", error=":1: odd")
    assert not has_documents("entry")
    mapped = stored_documents("entry", lambda: [odd, *documents])
    assert has_documents("entry") and stored_documents("entry", never).digest == mapped.digest
    held = corpus_of(documents)
    assert len(mapped.parts) > 1 and not any(part.flags.owndata for parts in mapped.parts for part in parts)
    for found, document in zip(mapped, documents, strict=True):
        assert (found.ids == document.ids).all() and (found.labels == document.labels).all()
    ((tokens, labels),) = held.parts
    for number, ids in enumerate((tokens, tokens[labels])):
        assert mapped.counts[number].tolist() == np.bincount(ids, minlength=99).tolist() == held.counts[number].tolist()
    assert mapped.digest == held.digest
    assert mapped.tally == Tally(3004, {"odd": 1}, ":1: odd", last_tokens=len(tokens))


def test_a_fault_on_the_way_leaves_nothing() -> None:
    def fail() -> Iterator[Document]:
        yield from some([300_000])
        raise UserError("the file ends here")

    with pytest.raises(UserError, match="the file ends here"):
        stored_documents("entry", fail)
    assert not has_documents("entry") and len(stored_documents("entry", lambda: some([5]))) == 1


def test_a_cache_that_is_named_needs_no_home(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert cache_root() == own_cache
    monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    with pytest.raises(UserError, match="has no home folder for tokenised data; name another with DRAFTSMITH_DATA_C"):
        cache_root()


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reader = tmp_path / "a.txt", reader_of(AutoTokenizer.from_pretrained(tiny_target_dir))
    path.write_text("the sea " * 9999)
    with small_files(5000), pytest.raises(UserError, match=r"cache: cannot be written to .*; free space there, or"):
        read_source(TextSource(kind="text", path=str(path)), "s", reader)
    monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", str(path))
    with pytest.raises(UserError, match=r"a\.txt: cannot be written to .*; name another folder"):
        read_source(TextSource(kind="text", path=str(path)), "s", reader)


def test_the_fingerprint_is_what_the_tokens_depend_on(
    tmp_path: Path, tiny_target_dir: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, other = (AutoTokenizer.from_pretrained(tiny_target_dir) for _ in range(2))
    other.add_tokens("sea")
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": "b"}]}\n')

    def entries(reader: Any = None, source: type = ChatSource, **settings: Any) -> int:
        kind = "chat" if source is ChatSource else "text"
        read_source(source(kind=kind, path=str(path), **settings), "s", reader or reader_of(tokenizer))
        return len(list(own_cache.rglob("cache-*.arrow")))

    assert entries() == entries() == 1
    assert entries(reader_of(tokenizer), max_skipped=0.5, weight=3.0) == 1
    assert entries(reader_of(other)) == 2
    assert entries(answers="last") == 3
    assert entries(limit=1) == 4
    tokenizer.chat_template = "{{ spare }}" + tokenizer.chat_template
    assert entries() == 5
    reader = reader_of(tokenizer, spare="x")
    assert entries(reader) == 6
    assert entries(replace(reader, rendering=replace(reader.rendering, end_ids=[7]))) == 7
    path.write_text(path.read_text() * 2)
    assert entries() == 8
    path.rename(tmp_path / "b.jsonl")
    path = tmp_path / "b.jsonl"
    assert entries() == 8
    path.write_text('{"text": "the sea"}\n')
    assert entries(source=TextSource) == 9
    monkeypatch.setattr("train.data.corpus.VERSION", 0)
    assert entries(source=TextSource) == 10
    for entry in own_cache.rglob("cache-*.arrow"):
        entry.write_bytes(entry.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"cache: holds a damaged file \(.*\); delete the folder"):
        entries(source=TextSource)


def test_several_processes_give_the_same_documents(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a fault in one of them is the run's, with its place."""
    path, reader = tmp_path / "a.jsonl", reader_of(AutoTokenizer.from_pretrained(tiny_target_dir))
    path.write_text("".join(f'{{"text": "{"the sea " * (n % 7)}{n}"}}\n' for n in range(300)))

    def read(name: str) -> Corpus:
        monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", str(tmp_path / name))
        return read_source(TextSource(kind="text", path=str(path)), "s", reader)

    one = read("one")
    monkeypatch.setattr(sources, "RECORDS_PER_PROCESS", 100)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    assert read("three").digest == one.digest and len(list((tmp_path / "three").rglob("cache-*.arrow"))) == 3
    path.write_text(path.read_text() + '{"words": "the sea"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:301: expected a record with 'text', got keys words"):
        read("three")


ANSWERS = {(5, 6): [1], (7, 8, 9): [2, 3, 2**31 - 1], (4,): [5, 6, 7, 8]}


@contextmanager
def opened(folder: Path, writer: int | None = None, said: list[str] | None = None) -> Iterator[AnswerStore]:
    lines: list[str] = [] if said is None else said
    with AnswerStore(folder, lines.append, writer) as store:
        store.read()
        yield store


def write(folder: Path) -> Path:
    with opened(folder, 0) as store:
        for prompt, answer in ANSWERS.items():
            store.add(prompt, answer)
    return folder / "0.jsonl"


def found(folder: Path) -> dict[tuple[int, ...], list[int]]:
    with opened(folder) as store:
        answers = {prompt: store.get(prompt) for prompt in ANSWERS}
    return {prompt: answer for prompt, answer in answers.items() if answer is not None}


def test_an_answer_is_kept_for_every_number_of_processes(tmp_path: Path) -> None:
    write(tmp_path)
    for writer in (0, 1, 2):
        with opened(tmp_path, writer) as store:
            assert all(store.get(prompt) == answer for prompt, answer in ANSWERS.items())
            store.add((5, 6), [9])  # the first answer stays
            store.add((writer,), [writer])
            assert store.get((writer,)) == [writer] and store.get((9, 9)) is None
    assert found(tmp_path) == ANSWERS


def test_a_file_cut_anywhere_loses_only_the_answer_that_was_being_written(tmp_path: Path) -> None:
    file = write(tmp_path)
    whole = file.read_bytes()
    kept = {prompt: answer for prompt, answer in ANSWERS.items() if prompt != (4,)}
    for missing in range(2, len(whole.splitlines(keepends=True)[-1]), 7):
        file.write_bytes(whole[:-missing])
        assert found(tmp_path) == kept  # to one who only reads
        said: list[str] = []
        with opened(tmp_path, 0, said) as store:
            assert "0.jsonl: 1 lines are no whole answers" in said[0]
            store.add((4,), ANSWERS[4,])
        assert found(tmp_path) == ANSWERS


def test_two_runs_do_not_write_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path, 0), pytest.raises(UserError, match="another run has the same target answer"):
        AnswerStore(tmp_path, print, 0).__enter__()
    with AnswerStore(tmp_path, print, 1) as store, pytest.raises(UserError, match="do not share it; name a folder"):
        store.read(3)


def test_a_full_disk_keeps_the_answers_before(tmp_path: Path) -> None:
    file = write(tmp_path)
    whole = file.read_bytes()
    with opened(tmp_path, 0) as store, small_files(len(whole) + 70):
        with pytest.raises(UserError, match="cannot be written to"):
            store.add((1, 2, 3), list(range(50)))
        assert file.read_bytes() == whole and store.get((1, 2, 3)) is None
        store.add((1,), [1])
        assert store.get((1,)) == [1]
