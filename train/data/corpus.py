"""Concatenated documents, in memory or memory-mapped from a folder that is written once.

A folder's name is a hash of everything that its tokens depend on. It is complete or absent. Before use, a process
verifies its hashes, and writes it again if it is damaged. All processes of a machine map the same pages.
"""

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heads.errors import UserError
from heads.files import file_hash, is_full_disk, whole_folder, write_json

FORMAT = 1
"""Version of the format, part of every folder's name. Raise it when the content for the same source changes."""
TYPES: dict[str, type[np.generic]] = {"tokens": np.int32, "labels": np.bool_, "ends": np.int64, "counts": np.int64}
MANIFEST = "manifest.json"
CHUNK = 2**18
"""Tokens that are counted at a time, which bounds the memory for int64 copies."""


@dataclass(frozen=True)
class Document:
    """Token ids, with a mask of the labels: the tokens that the head learns to predict."""

    ids: NDArray[np.int32]
    labels: NDArray[np.bool_]

    def __post_init__(self) -> None:
        assert self.ids.shape == self.labels.shape, (self.ids.shape, self.labels.shape)

    @classmethod
    def of(cls, ids: Sequence[int], labels: ArrayLike) -> Self:
        """Return a document of token ids and array-like labels."""
        return cls(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.bool_))


@dataclass
class Tally:
    """Counts of the records from which documents were made."""

    records: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of records left out, by reason."""
    first_skipped: str = ""
    """Location and fault of the first record left out, without the name of the source."""
    too_long: int = 0
    """Number of conversations left out because their first prompt is too long."""
    last_tokens: int = 0
    """Tokens of the conversations, each counted once, in the text of its last answer."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Concatenated documents with N tokens in total."""

    tokens: NDArray[np.int32]  # (N,)
    labels: NDArray[np.bool_]  # (N,)
    ends: NDArray[np.int64]  # for each document, the index after its last token
    counts: NDArray[np.int64]  # (2, V): how often each token occurs, and how often as a label
    files: dict[str, str]
    """Hash of each of these arrays, as stored in a file."""
    tally: Tally = field(default_factory=Tally)

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Document]:
        start = 0
        for end in self.ends.tolist():
            yield Document(self.tokens[start:end], self.labels[start:end])
            start = end

    @property
    def digest(self) -> str:
        """A hash of every token, label and end."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()

    @property
    def num_labels(self) -> int:
        return int(self.counts[1].sum())


def _joined(tokens: NDArray[np.int32], labels: NDArray[np.bool_], lengths: Sequence[int]) -> Corpus:
    """Return a corpus of concatenated documents with these lengths."""
    counts = np.zeros((2, int(tokens.max(initial=0)) + 1), dtype=np.int64)
    for start in range(0, len(tokens), CHUNK):
        some, chosen = tokens[start : start + CHUNK], labels[start : start + CHUNK]
        counts += [np.bincount(ids, minlength=counts.shape[1]) for ids in (some, some[chosen])]
    ends = np.cumsum(lengths, dtype=np.int64)
    parts: list[NDArray[Any]] = [tokens, labels, ends, counts]
    files = {name: hashlib.sha256(part.data).hexdigest() for name, part in zip(TYPES, parts, strict=True)}
    return Corpus(tokens, labels, ends, counts, files)


def corpus_of(documents: Iterable[Document]) -> Corpus:
    """Return a corpus of documents in memory."""
    held = list(documents)
    tokens = np.concatenate([np.zeros(0, np.int32), *(document.ids for document in held)])
    labels = np.concatenate([np.zeros(0, np.bool_), *(document.labels for document in held)])
    return _joined(tokens, labels, [len(document.ids) for document in held])


def cache_root() -> Path:
    """Return the folder for all tokenised data on this machine: `DRAFTSMITH_DATA_CACHE`, else a folder in
    `XDG_CACHE_HOME`."""
    named = os.environ.get("DRAFTSMITH_DATA_CACHE")
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else above / "draftsmith" / "data"


def entry_name(key: dict[str, Any]) -> str:
    """Return the name of the folder for documents that depend on `key`, a dict of plain values."""
    return hashlib.sha256(json.dumps([FORMAT, key], sort_keys=True).encode()).hexdigest()[:32]


def write_once(name: str, documents: Callable[[Tally], Iterable[Document]]) -> None:
    """Write the folder `name`, unless it exists and is intact. Wait for another run that is writing it.

    `documents`: returns the documents, and counts their records in the tally. UserError if the folder is not writable.
    """
    root = cache_root()
    with unwritable(root):
        root.mkdir(parents=True, exist_ok=True)
        with held_file(root / f".{name}.lock"):
            if is_sound(root / name):
                return
            with whole_folder(root / name) as temporary:
                tally = Tally()
                _write(temporary, documents(tally), tally)


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Turn an OSError from writing to a folder of the cache into a UserError."""
    try:
        yield
    except OSError as error:
        remedy = "free space there, or " * is_full_disk(error) + "name another folder with DRAFTSMITH_DATA_CACHE"
        raise UserError(f"{folder}: cannot be written to ({error.strerror}); {remedy}") from error


def open_entry(name: str) -> Corpus:
    """Memory-map the folder `name`, which `write_once` has written."""
    folder = cache_root() / name
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    tokens, labels, ends, counts = (_map(folder / part, kind) for part, kind in TYPES.items())
    return Corpus(tokens, labels, ends, counts.reshape(2, -1), manifest["files"], Tally(**manifest["tally"]))


def is_sound(folder: Path) -> bool:
    """Return True if a folder of documents matches its manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        Tally(**manifest["tally"])
        return all(file_hash(folder / name) == manifest["files"][name] for name in TYPES)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _write(folder: Path, documents: Iterable[Document], tally: Tally) -> None:
    lengths = array("q")
    with (folder / "tokens").open("wb") as tokens, (folder / "labels").open("wb") as labels:
        for document in documents:
            tokens.write(document.ids.data)
            labels.write(document.labels.data)
            lengths.append(len(document.ids))
    corpus = _joined(_map(folder / "tokens", np.int32), _map(folder / "labels", np.bool_), lengths)
    for name in ("ends", "counts"):
        (folder / name).write_bytes(getattr(corpus, name).tobytes())
    write_json(folder / MANIFEST, {"files": corpus.files, "tally": asdict(tally)})


def _map(path: Path, kind: type[np.generic]) -> NDArray[Any]:
    """Return the numbers in a file, memory-mapped. An empty file cannot be mapped."""
    return np.memmap(path, kind, "r") if path.stat().st_size else np.zeros(0, kind)


@contextmanager
def held_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file for a `with` block. Wait for another process that holds it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
