"""Documents behind one another, in memory or mapped from a folder that is written once.

A folder is named by a hash of all that its tokens depend on. It is complete or absent, read through by the process that
would else write it, and written anew where it is damaged. All processes of a machine map the same pages.
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
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heads.checkpoint import file_hash
from heads.errors import UserError
from heads.files import whole_folder, write_json

FORMAT = 1
"""Part of every folder's name, raised by a change of what is written for the same source."""
TYPES: dict[str, type[np.generic]] = {"tokens": np.int32, "labels": np.bool_, "ends": np.int64, "counts": np.int64}
MANIFEST = "manifest.json"
CHUNK = 2**18
"""Tokens that are held before they are written."""


@dataclass(frozen=True)
class Document:
    """Token ids and, for each of them, whether it is a label: a token that the head learns to foresee."""

    ids: NDArray[np.int32]
    labels: NDArray[np.bool_]

    def __post_init__(self) -> None:
        assert self.ids.shape == self.labels.shape, (self.ids.shape, self.labels.shape)

    @classmethod
    def of(cls, ids: Sequence[int], labels: ArrayLike) -> Self:
        """A document of token ids and labels of any form."""
        return cls(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.bool_))


@dataclass
class Tally:
    """Counts of the records that documents were made of."""

    records: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Records left out, by the reason why."""
    first_skipped: str = ""
    """Place and fault of the first of them, without the name of the source."""
    last_tokens: int = 0
    """Tokens of the conversations, each as it stands at its last answer."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents behind one another, N tokens together."""

    tokens: NDArray[np.int32]  # (N,)
    labels: NDArray[np.bool_]  # (N,)
    ends: NDArray[np.int64]  # for each document, the place behind its last token
    counts: NDArray[np.int64]  # (2, V): how often each token occurs, and how often as a label
    digest: str
    """A hash of every token, label and end."""
    tally: Tally = field(default_factory=Tally)

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Document]:
        start = 0
        for end in self.ends.tolist():
            yield Document(self.tokens[start:end], self.labels[start:end])
            start = end

    @property
    def num_labels(self) -> int:
        return int(self.counts[1].sum())


class _Chunk(NamedTuple):
    """Whole documents behind one another."""

    tokens: NDArray[np.int32]
    labels: NDArray[np.bool_]
    lengths: list[int]


class _Sums:
    """Counts, ends and hashes of chunks that pass."""

    def __init__(self) -> None:
        self.counts = np.zeros((2, 1), dtype=np.int64)
        self.lengths = array("q")
        self.hashes = {name: hashlib.sha256() for name in ("tokens", "labels")}

    def add(self, chunk: _Chunk) -> None:
        for name, part in (("tokens", chunk.tokens), ("labels", chunk.labels)):
            self.hashes[name].update(part.data)
        self.lengths.extend(chunk.lengths)
        size = max(self.counts.shape[1], int(chunk.tokens.max(initial=0)) + 1)
        seen = [np.bincount(tokens, minlength=size) for tokens in (chunk.tokens, chunk.tokens[chunk.labels])]
        self.counts = np.pad(self.counts, ((0, 0), (0, size - self.counts.shape[1]))) + seen

    @property
    def ends(self) -> NDArray[np.int64]:
        return np.cumsum(np.array(self.lengths, dtype=np.int64))

    def files(self) -> dict[str, str]:
        """The hash of each file that holds the chunks."""
        rest = {"ends": self.ends, "counts": self.counts}
        whole = {name: hashlib.sha256(part.data) for name, part in rest.items()}
        return {name: made.hexdigest() for name, made in (self.hashes | whole).items()}


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def corpus_of(documents: Iterable[Document]) -> Corpus:
    """Documents in memory as a corpus."""
    sums, chunks = _Sums(), list(_chunks(documents))
    for chunk in chunks:
        sums.add(chunk)
    tokens, labels = (
        np.concatenate([np.zeros(0, kind), *parts])
        for kind, parts in ((np.int32, [c.tokens for c in chunks]), (np.bool_, [c.labels for c in chunks]))
    )
    return Corpus(tokens, labels, sums.ends, sums.counts, _digest(sums.files()))


def cache_root() -> Path:
    """The folder of all that was tokenised on this machine: `DRAFTSMITH_DATA_CACHE`, else below `XDG_CACHE_HOME`."""
    named = os.environ.get("DRAFTSMITH_DATA_CACHE")
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else above / "draftsmith" / "data"


def entry_name(key: dict[str, Any]) -> str:
    """The name of the folder for documents that depend on `key`, plain values."""
    return hashlib.sha256(json.dumps([FORMAT, key], sort_keys=True).encode()).hexdigest()[:32]


def write_once(name: str, documents: Callable[[Tally], Iterable[Document]]) -> None:
    """Write the folder called `name`, unless it is there and sound. Another run that writes the same is waited for.

    documents: the source, which counts its records in the tally. UserError where the folder cannot be written.
    """
    root = cache_root()
    with unwritable(root):
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{name}.lock"):
            if find_fault(root / name) is None:
                return
            with whole_folder(root / name) as temporary:
                tally = Tally()
                _write(temporary, documents(tally), tally)


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Turn the failure to write to a folder of the cache into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written to ({error.strerror}); free space there, or name another folder with "
            "DRAFTSMITH_DATA_CACHE"
        ) from error


def open_entry(name: str) -> Corpus:
    """Map what `write_once` wrote."""
    folder = cache_root() / name
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    tokens, labels, ends, counts = (_map(folder / part, kind) for part, kind in TYPES.items())
    return Corpus(tokens, labels, ends, counts.reshape(2, -1), _digest(manifest["files"]), Tally(**manifest["tally"]))


def find_fault(folder: Path) -> str | None:
    """The fault of a folder of documents, by its manifest; None for a sound one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        Tally(**manifest["tally"])
        for name in TYPES:
            if file_hash(folder / name) != manifest["files"][name]:
                return f"{name} was changed after it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "a file of it is missing or unreadable"
    return None


def _write(folder: Path, documents: Iterable[Document], tally: Tally) -> None:
    sums = _Sums()
    with (folder / "tokens").open("wb") as tokens, (folder / "labels").open("wb") as labels:
        for chunk in _chunks(documents):
            tokens.write(chunk.tokens.data)
            labels.write(chunk.labels.data)
            sums.add(chunk)
    for name, part in (("ends", sums.ends), ("counts", sums.counts)):
        (folder / name).write_bytes(part.tobytes())
    write_json(folder / MANIFEST, {"files": sums.files(), "tally": asdict(tally)})


def _chunks(documents: Iterable[Document]) -> Iterator[_Chunk]:
    held: list[Document] = []
    size = 0

    def taken() -> _Chunk:
        ids, labels = ([getattr(document, part) for document in held] for part in ("ids", "labels"))
        return _Chunk(np.concatenate(ids), np.concatenate(labels), [len(part) for part in ids])

    for document in documents:
        held.append(document)
        size += len(document.ids)
        if size >= CHUNK:
            yield taken()
            held, size = [], 0
    if held:
        yield taken()


def _map(path: Path, kind: type[np.generic]) -> NDArray[Any]:
    """The numbers in a file, read where they are used. An empty file cannot be mapped."""
    return np.memmap(path, kind, "r") if path.stat().st_size else np.zeros(0, kind)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file, until the end of the process if need be; wait for another process that does."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
