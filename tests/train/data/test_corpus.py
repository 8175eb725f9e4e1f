"""The cache: tokens are mapped as they were written."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase as Tokenizer

from heads.core.errors import UserError
from heads.targets.target_files import load_tokenizer
from tests.support.annotations import Patch
from tests.support.chats import reader_of
from tests.support.faults import small_files
from tests.support.refusals import refused
from train.data import tokenise
from train.data.corpus import Corpus, Document, Tally, corpus_of, has_documents, load_documents
from train.data.sources import ChatSource, TextSource
from train.data.tokenise import read_source

pytestmark = pytest.mark.usefixtures("own_cache")


def some(lengths: list[int]) -> list[Document]:
    rng = np.random.default_rng(0)
    return [Document(rng.integers(0, 99, length).astype(np.int32), rng.random(length) < 0.5) for length in lengths]


def test_what_is_mapped_is_what_was_written() -> None:
    documents = some([3, 300_000, 1, *[40] * 3000])
    odd = Document.of([], [], reason="odd", error=":1: odd")
    assert not has_documents("entry")
    mapped = load_documents("entry", lambda: [[odd], *([document] for document in documents)])
    assert has_documents("entry") and load_documents("entry", pytest.fail).digest == mapped.digest
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
    def fail() -> Iterator[list[Document]]:
        yield some([300_000])
        raise UserError("the file ends here")

    assert "the file ends here" in refused(load_documents, "entry", fail)
    assert not has_documents("entry") and len(load_documents("entry", lambda: [some([5])])) == 1


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: Patch) -> None:
    path, reader = tmp_path / "a.txt", reader_of(tokenizer)
    path.write_text("the sea " * 9999)
    with small_files(5000), pytest.raises(UserError, match=r"cache: cannot be written to .*; free space there, or"):
        read_source(TextSource(kind="text", path=str(path)), "s", reader)
    monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", str(path))
    with pytest.raises(UserError, match=r"a\.txt: cannot be written to .*; name another folder"):
        read_source(TextSource(kind="text", path=str(path)), "s", reader)


def test_the_fingerprint_is_what_the_tokens_depend_on(
    tmp_path: Path, tiny_target_dir: Path, own_cache: Path, monkeypatch: Patch
) -> None:
    tokenizer, other = (load_tokenizer(str(tiny_target_dir)) for _ in range(2))
    other.add_tokens("sea")
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": "b"}]}\n')

    def entries(reader: Any = None, source: type = ChatSource, **settings: Any) -> int:
        kind = "chat" if source is ChatSource else "text"
        read_source(source(kind=kind, path=str(path), **settings), "s", reader or reader_of(tokenizer))
        return len(list(own_cache.rglob("*.arrow")))

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
    path = path.rename(tmp_path / "b.jsonl")
    assert entries() == 8
    path.write_text('{"text": "the sea"}\n')
    assert entries(source=TextSource) == 9
    monkeypatch.setattr("train.data.corpus.VERSION", 0)
    assert entries(source=TextSource) == 10
    for entry in own_cache.rglob("*.arrow"):
        entry.write_bytes(entry.read_bytes()[:-50])
    assert re.search(r"cache: holds a damaged file \(.*\); delete the folder", refused(entries, source=TextSource))


def test_several_processes_give_the_same_documents(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: Patch) -> None:
    """And a fault in one of them is the run's, with its place."""
    path, reader = tmp_path / "a.jsonl", reader_of(tokenizer)
    path.write_text("".join(f'{{"text": "{"the sea " * (n % 7)}{n}"}}\n' for n in range(300)))

    def read(name: str) -> Corpus:
        monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", str(tmp_path / name))
        return read_source(TextSource(kind="text", path=str(path)), "s", reader)

    one = read("one")
    monkeypatch.setattr(tokenise, "RECORDS_PER_PROCESS", 100)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    assert read("three").digest == one.digest and len(list((tmp_path / "three").rglob("*.arrow"))) == 3
    path.write_text(path.read_text() + '{"words": "the sea"}\n')
    assert "a.jsonl:301: expected a record with 'text', got keys words" in refused(read, "three")
