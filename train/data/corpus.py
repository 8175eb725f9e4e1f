"""Tokenised documents in the cache of `datasets`.

A data set's fingerprint is a hash of everything on which its tokens depend, so a run that needs the same tokens maps
them into memory. `datasets` writes a data set completely or not at all, and lets one process write at a time.
"""

import hashlib
import json
import os
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eval.core.progress import Progress
from heads.core.errors import UserError, first_line
from heads.core.files import expanded, is_full_disk, lock
from train.core.interrupts import Interrupted

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset

    from eval.data.chat_template import ChatTemplate

VERSION = 9
"""Version of the code that makes documents, part of every fingerprint. Raise it when it makes others."""
TOO_LONG = "a first prompt that is too long"
"""Reason of a conversation whose first prompt is too long for `prompt_tokens`; it is counted apart."""
HELD_OUT = "held out"
"""Reason of a conversation that begins as one of `held_out`; it is counted apart, too."""


@dataclass(frozen=True)
class Document:
    """Token ids, with a mask of the labels: the tokens that the head learns to predict."""

    ids: NDArray[np.int32]
    labels: NDArray[np.bool_]
    reason: str = ""
    """Reason why the record was skipped (there are no tokens then) or ends early, in general words."""
    error: str = ""
    """Location and fault of a record that was skipped, without the name of the source."""
    form: str = ""
    """Form of the record, in its last document."""
    unread: str = ""
    """Columns of the record that its form does not read, a line each, in its last document."""
    notes: str = ""
    """What is worth saying of the record or of its answers, in general words, a line each, in its last document."""

    @classmethod
    def of(cls, ids: Sequence[int], labels: ArrayLike, **more: str) -> Self:
        return cls(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.bool_), **more)


@dataclass(frozen=True)
class Tally:
    """Counts of the records from which documents were made."""

    records: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of records skipped, or ending early, by reason."""
    first_skipped: str = ""
    """Location and fault of the first skipped record, without the name of the source."""
    too_long: int = 0
    """Number of conversations skipped because their first prompt is too long."""
    held_out: int = 0
    """Number of conversations skipped because they begin as one that is held out."""
    forms: dict[str, int] = field(default_factory=dict)
    """Number of records used, by form."""
    unread: dict[str, int] = field(default_factory=dict)
    """Number of records with text in a column that their form does not read, by column."""
    notes: dict[str, int] = field(default_factory=dict)
    """Number of times that each note is made."""
    last_tokens: int = 0
    """Tokens of the records' last documents. A conversation's last document holds its whole text."""

    @property
    def num_skipped(self) -> int:
        return sum(self.skipped.values())


@dataclass(frozen=True, eq=False)
class Corpus:
    """Concatenated documents with N tokens in total, in one or more parts, which may be memory-mapped."""

    parts: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]]
    """Pairs of tokens and labels. No document is in two parts."""
    ends: NDArray[np.int64]
    """For each document, the index after its last token."""
    tally: Tally = field(default_factory=Tally)

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Document]:
        start = 0
        for end in self.ends.tolist():
            yield Document(*self.span(start, end - start))
            start = end

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(tokens) for tokens, _ in self.parts)][:-1]

    def span(self, start: int, length: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return tokens and labels of a stretch of one document, without copying them."""
        number = bisect_right(self._starts, start) - 1
        tokens, labels = self.parts[number]
        piece = slice(start - self._starts[number], start - self._starts[number] + length)
        return tokens[piece], labels[piece]

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of times that each token occurs, and that it is a label, (2, V)."""
        size = max((int(tokens.max()) + 1 for tokens, _ in self.parts), default=1)
        counts = np.zeros((2, size), dtype=np.int64)
        for tokens, labels in self.parts:
            counts += [np.bincount(ids, minlength=size) for ids in (tokens, tokens[labels])]
        return counts

    @property
    def num_labels(self) -> int:
        return int(self.counts[1].sum())

    @cached_property
    def digest(self) -> str:
        """A hash of every token, label and end."""
        hashes = {name: hashlib.sha256() for name in ("tokens", "labels", "ends", "counts")}
        for tokens, labels in self.parts:
            hashes["tokens"].update(tokens.data)
            hashes["labels"].update(labels.data)
        hashes["ends"].update(self.ends.data)
        hashes["counts"].update(self.counts.data)
        digests = {name: value.hexdigest() for name, value in hashes.items()}
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def corpus_of(documents: Iterable[Document]) -> Corpus:
    ids, labels = zip(*((document.ids, document.labels) for document in documents), strict=True)
    return Corpus([(np.concatenate(ids), np.concatenate(labels))], np.cumsum([*map(len, ids)], dtype=np.int64))


def cache_root() -> Path:
    """Return the folder for all tokenised data on this machine: `DRAFTSMITH_DATA_CACHE`, else a folder in
    `XDG_CACHE_HOME`."""
    if named := os.environ.get("DRAFTSMITH_DATA_CACHE"):
        return Path(expanded(named))
    try:
        above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise UserError(
            "this user has no home folder for tokenised data; name another with DRAFTSMITH_DATA_CACHE"
        ) from None
    return above / "draftsmith" / "data"


@contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turn an error from writing to a folder of the cache, or from a damaged file in it, into a UserError."""
    from pyarrow import ArrowInvalid

    try:
        yield
    except (OSError, ArrowInvalid) as error:
        if isinstance(error, ArrowInvalid) or error.errno is None:
            raise UserError(f"{folder}: holds a damaged file ({first_line(error)}); delete the folder") from error
        remedy = "free space there, or " * is_full_disk(error) + "name another folder with DRAFTSMITH_DATA_CACHE"
        raise UserError(f"{folder}: cannot be written to ({error.strerror}); {remedy}") from error


def fingerprint(key: dict[str, object]) -> str:
    """Return the fingerprint of data that depend on `key`, a dict of plain values, and on the code."""
    return hashlib.sha256(json.dumps([VERSION, key], sort_keys=True).encode()).hexdigest()[:32]


def record_rows(documents: Sequence[Document]) -> Iterator[dict[str, object]]:
    """Yield the rows of a data set for the documents of one record."""
    for number, document in enumerate(documents, start=1):
        labels = document.labels.view(np.uint8)  # Arrow would pack bools into bits
        yield vars(document) | {"labels": labels, "ends_record": number == len(documents)}


def document_features() -> object:
    from datasets import Features, List, Value

    kinds = {"ids": List(Value("int32")), "labels": List(Value("uint8")), "ends_record": Value("bool")}
    return Features(kinds | dict.fromkeys(("reason", "error", "form", "unread", "notes"), Value("string")))


def load_documents(
    name: str, records: Callable[..., Iterable[Sequence[Document]]], shares: Sequence[range] | None = None
) -> Corpus:
    """Return the corpus with a fingerprint. `records` yields the documents of each record, if it is not in the cache.
    `shares`: as many processes call it, each with one of these."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    def rows(shares: Sequence[range] | None = None) -> Iterator[dict[str, object]]:
        for documents in records() if shares is None else chain.from_iterable(map(records, shares)):
            yield from record_rows(documents)

    datasets.disable_progress_bars()
    cache_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=cache_root()) as file:
        if lock(file.fileno()) is None:  # it would fail, or wait for ever
            builder: Any = datasets.builder
            builder.FileLock = lambda path: nullcontext()
    shared = {} if shares is None else {"gen_kwargs": {"shares": [*shares]}, "num_proc": len(shares)}
    where = {"cache_dir": str(cache_root()), "fingerprint": name}
    try:
        documents = datasets.Dataset.from_generator(rows, features=document_features(), **where, **shared)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    return corpus_of_rows(documents)


def has_documents(name: str) -> bool:
    return any(cache_root().glob(f"generator/*={name}/*/dataset_info.json"))


def corpus_of_rows(rows: "Dataset") -> Corpus:
    """Return the documents in a data set, memory-mapped."""
    from pyarrow import compute

    table = rows.data
    ids = [chunk.flatten().to_numpy() for chunk in table.column("ids").chunks]
    labels = [chunk.flatten().to_numpy().view(np.bool_) for chunk in table.column("labels").chunks]
    parts = [pair for pair in zip(ids, labels, strict=True) if len(pair[0])]
    lengths = compute.list_value_length(table.column("ids")).to_numpy().astype(np.int64)
    ends_record = table.column("ends_record").to_numpy()

    def counted(name: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for entry in compute.value_counts(table.column(name)).to_pylist():
            for line in entry["values"].splitlines():
                counts[line] += entry["counts"]
        return dict(counts.most_common())

    skipped = counted("reason")
    tally = Tally(
        records=int(ends_record.sum()),
        first_skipped=next((error for error in table.column("error").unique().to_pylist() if error), ""),
        too_long=skipped.pop(TOO_LONG, 0),
        held_out=skipped.pop(HELD_OUT, 0),
        skipped=skipped,
        forms=counted("form"),
        unread=counted("unread"),
        notes=counted("notes"),
        last_tokens=int(lengths[ends_record].sum()),
    )
    return Corpus(parts, np.cumsum(lengths[lengths > 0]), tally)


@dataclass(frozen=True)
class Reader:
    """A reader of a run's data, in all its processes: the first one of each node writes what the cache lacks."""

    rendering: "ChatTemplate"
    accelerator: "Accelerator"
    say: Callable[[str], None]

    def read(self, what: str, read: Callable[[], Corpus]) -> Corpus:
        """Return `read()`, which the first process of each node calls first, so that the others find data in the cache.
        The first UserError or interruption is raised on all processes, so that none is left waiting. UserError if the
        nodes have other data."""
        from accelerate.utils import gather_object

        corpus = None
        faults: list[UserError | Interrupted] = []
        if self.accelerator.is_local_main_process:
            try:
                with cache_errors(cache_root()), Progress(f"{what}: tokenising", announced=True):
                    corpus = read()
            except (UserError, Interrupted) as error:
                faults = [error]
        if faults := gather_object(faults):
            raise faults[0]
        corpus = read() if corpus is None else corpus
        if len(set(gather_object([corpus.digest]))) > 1:
            raise UserError(f"{what}: the machines of this launch read different data; give all of them the same")
        return corpus
