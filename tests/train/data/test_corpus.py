"""Tokens on disk: written once, complete or absent, the same for all who map them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.chats import reader_of
from train.data.corpus import Document, Tally, cache_root, corpus_of, is_sound, open_entry, write_once
from train.data.loading import read_source
from train.data.sources import ChatSource, TextSource

pytestmark = pytest.mark.usefixtures("own_cache")


def some(lengths: list[int]) -> list[Document]:
    rng = np.random.default_rng(0)
    return [Document(rng.integers(0, 99, length).astype(np.int32), rng.random(length) < 0.5) for length in lengths]


def test_what_is_mapped_is_what_was_written() -> None:
    documents = some([3, 300_000, 1, 40])

    def read(tally: Tally) -> list[Document]:
        tally.records, tally.skipped["odd"], tally.first_skipped = 5, 1, ":1: odd"
        return documents

    write_once("entry", read)
    mapped, held = open_entry("entry"), corpus_of(documents)
    assert isinstance(mapped.tokens, np.memmap) and mapped.digest == held.digest
    for found, document in zip(mapped, documents, strict=True):
        assert (found.ids == document.ids).all() and (found.labels == document.labels).all()
    for number, ids in enumerate((held.tokens, held.tokens[held.labels])):
        assert mapped.counts[number].tolist() == np.bincount(ids, minlength=99).tolist() == held.counts[number].tolist()
    assert mapped.tally == Tally(5, {"odd": 1}, ":1: odd")


@pytest.mark.parametrize("name", ["tokens", "labels", "ends", "counts", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "absent"])
def test_a_damaged_folder_is_written_anew(name: str, damage: str, own_cache: Path) -> None:
    write_once("entry", lambda tally: some([50]))
    digest, file = open_entry("entry").digest, own_cache / "entry" / name
    data = file.read_bytes()
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(data[:-3] if damage == "cut" else data[:4] + bytes([data[4] ^ 1]) + data[5:])
    write_once("entry", lambda tally: some([50]))
    assert file.read_bytes() == data and open_entry("entry").digest == digest


def test_a_fault_on_the_way_leaves_nothing(own_cache: Path) -> None:
    def fail(tally: Tally) -> Iterator[Document]:
        yield from some([300_000])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_once("entry", fail)
    assert [path.name for path in own_cache.iterdir()] == [".entry.lock"]


def test_a_source_without_documents_is_an_empty_corpus() -> None:
    write_once("entry", lambda tally: [])
    assert len(open_entry("entry")) == len(open_entry("entry").tokens) == open_entry("entry").num_labels == 0


def test_the_name_is_what_the_tokens_depend_on(tmp_path: Path, tiny_target_dir: Path) -> None:
    tokenizer, other = (AutoTokenizer.from_pretrained(tiny_target_dir) for _ in range(2))
    other.add_tokens("sea")
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": "b"}]}\n')

    def entries(reader: Any = None, source: type = ChatSource, **settings: Any) -> int:
        kind = "chat" if source is ChatSource else "text"
        read_source(source(kind=kind, path=str(path), **settings), "s", reader or reader_of(tokenizer))
        return sum(not entry.name.startswith(".") for entry in cache_root().iterdir())

    assert entries() == entries() == 1
    assert entries(reader_of(tokenizer), max_skipped=0.5, weight=3.0) == 1
    assert entries(reader_of(other)) == 2
    assert entries(answers="last") == 3
    assert entries(limit=1) == 4
    tokenizer.chat_template = "{{ spare }}" + tokenizer.chat_template
    assert entries() == 5
    assert entries(reader_of(tokenizer, spare="x")) == 6
    path.write_text(path.read_text() * 2)
    assert entries() == 7
    path.rename(tmp_path / "b.jsonl")
    path = tmp_path / "b.jsonl"
    assert entries() == 7
    path.write_text('{"text": "the sea"}\n')
    assert entries(source=TextSource) == 8


WRITER = """
import os, sys, time
import numpy as np
from train.data.corpus import Document, open_entry, write_once

def read(tally):
    for n in range(30):
        print("reading", flush=True)
        time.sleep(float(sys.argv[1]))
        yield Document(np.full(2**17, n, dtype=np.int32), np.ones(2**17, dtype=np.bool_))

write_once("entry", read)
print(open_entry("entry").digest, flush=True)
"""


def start(seconds: float) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", WRITER, str(seconds)], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_that_write_the_same_write_it_once_and_map_it(own_cache: Path) -> None:
    said = [process.communicate()[0].split() for process in [start(0.05) for _ in range(2)]]
    assert said[0][-1] == said[1][-1] and sorted(len(words) for words in said) == [1, 31]
    assert sorted(path.name for path in own_cache.iterdir()) == [".entry.lock", "entry"]


@pytest.mark.slow
def test_a_killed_writer_leaves_no_entry_and_no_lock(own_cache: Path) -> None:
    process = start(0.2)
    assert process.stdout is not None
    while not list(own_cache.glob(".entry.tmp/tokens")) or not (own_cache / ".entry.tmp/tokens").stat().st_size:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (own_cache / "entry").exists() and not is_sound(own_cache / "entry")
    again = start(0.0)
    assert len(again.communicate()[0].split()) == 31
    assert sorted(path.name for path in own_cache.iterdir()) == [".entry.lock", "entry"]


OWN = """
import sys
from pathlib import Path
from train.data.corpus import open_entry
from train.data.packing import Mixture, Pool

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

before = own()
pool = Pool(open_entry("entry"), 2048)
mixture = Mixture([pool], [1.0], 0)
mixture.digest()
for index in range(len(pool)):
    pool.row(index)
print((own() - before) / len(pool.corpus.tokens))
"""


@pytest.mark.slow
def test_a_process_that_maps_holds_under_half_a_byte_a_token() -> None:
    write_once("entry", lambda tally: some([1000] * 8000))
    done = subprocess.run([sys.executable, "-c", OWN], stdout=subprocess.PIPE, text=True, check=True)
    assert float(done.stdout) < 0.5
