"""A store of a target's answers, indexed by their prompts. It is outside the run's folder, so all heads can use it.

A folder belongs to one target and its sampling settings. Each process of a launch appends to its own log, with one
record per answer, in a single write. A record is a checksum of the rest, the hash of the prompt, the number of tokens,
and the tokens as int32. The tokens of a prompt include the template, its arguments and all earlier turns.

An answer is on disk as soon as it is added, however the process ends. Only truncated or damaged records are dropped.
"""

import errno
import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from heads.errors import UserError
from train.data.corpus import unwritable

HEADER = struct.Struct("<I16sI")
"""Checksum of the rest of the record, hash of the prompt, number of tokens."""
CHECKSUM_BYTES = 4


def prompt_key(prompt: Sequence[int]) -> bytes:
    """Return a hash of a prompt's tokens, 16 bytes."""
    return hashlib.sha256(np.array(prompt, dtype="<i4").tobytes()).digest()[:16]


class AnswerStore:
    """The answers in a folder, open for a `with` block."""

    def __init__(self, folder: Path, say: Callable[[str], None], writer: int | None = None) -> None:
        """`writer`: the number of the log to which answers are added; None opens the store read-only."""
        self.folder, self.say, self.writer = folder, say, writer
        self._places: dict[bytes, tuple[BinaryIO, int, int]] = {}
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Self:
        """Lock the log for writing. UserError if another run holds it or it is not writable."""
        if self.writer is None:
            return self
        with unwritable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            log = self._path(self.writer)
            self._files[log] = log.open("ab+", buffering=0)
            try:
                fcntl.flock(self._files[log], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.__exit__()
                raise UserError(
                    f"{self.folder}: another run has the same target answer into this folder; begin again when it has "
                    "its answers, and they are this run's too"
                ) from None
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def __len__(self) -> int:
        return len(self._places)

    def read(self, num_writers: int = 0) -> None:
        """Index the answers in all logs. UserError if the log of one of the launch's `num_writers` is missing."""
        if not all(self._path(writer).is_file() for writer in range(num_writers)):
            raise UserError(
                f"{self.folder}: the machines of this launch do not share it; name a folder that they share with "
                "DRAFTSMITH_DATA_CACHE"
            )
        for path in sorted(self.folder.glob("*.log")):
            with unwritable(self.folder):
                own = path in self._files
                if not own:
                    self._files[path] = path.open("rb", buffering=0)
                file = self._files[path]
                end, damaged = 0, os.fstat(file.fileno()).st_size
                for key, start, count in _records(path, damaged):
                    self._places.setdefault(key, (file, start, count))
                    end = start + 4 * count
                    damaged -= HEADER.size + 4 * count
                if damaged:
                    self.say(f"{path}: {damaged} bytes are no whole answers; they are dropped, and asked for again")
                if own:
                    file.truncate(end)

    def get(self, prompt: Sequence[int]) -> list[int] | None:
        """Return the answer to a prompt, or None."""
        place = self._places.get(prompt_key(prompt))
        if place is None:
            return None
        file, start, count = place
        tokens: list[int] = np.frombuffer(os.pread(file.fileno(), 4 * count, start), "<i4").tolist()
        return tokens

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Store an answer, unless the prompt already has one."""
        key = prompt_key(prompt)
        if key in self._places:
            return
        assert self.writer is not None
        log = self._files[self._path(self.writer)]
        begin = os.fstat(log.fileno()).st_size
        body = HEADER.pack(0, key, len(answer))[CHECKSUM_BYTES:] + np.array(answer, dtype="<i4").tobytes()
        record = zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little") + body
        with unwritable(self.folder):
            if log.write(record) != len(record):
                log.truncate(begin)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._places[key] = (log, begin + HEADER.size, len(answer))

    def _path(self, writer: int) -> Path:
        return self.folder / f"{writer}.log"


def _records(path: Path, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (hash of the prompt, offset of the first token, number of tokens) of each intact record."""
    data = np.memmap(path, np.uint8, "r", shape=(size,)).data if size else memoryview(b"")
    at = 0
    while at + HEADER.size <= size:
        checksum, key, count = HEADER.unpack_from(data, at)
        start, end = at + HEADER.size, at + HEADER.size + 4 * count
        if end > size:
            return
        if zlib.crc32(data[at + CHECKSUM_BYTES : end]) == checksum:
            yield key, start, count
        at = end
