"""What a measurement has measured so far, in a file that it leaves if it is interrupted, so that the same command goes
on."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from heads.core.errors import UserError
from heads.core.files import lock

UNFINISHED = "unfinished.jsonl"
"""Name of the file in the folder of a measurement. Its first line says which command measures."""


class Journal:
    """Records of a measurement, each under its part and its place in this part. Without a file nothing is kept."""

    def __init__(self, file: TextIO | None = None) -> None:
        """`file`: open to be read and written, at its second line."""
        self._file, self._parts = file, 0
        self._records: dict[str, object] = {}
        end = file.tell() if file is not None else 0
        while file is not None and (line := file.readline()).endswith("\n"):
            with suppress(ValueError, LookupError, TypeError):
                record = json.loads(line)
                self._records[record["at"]] = record["is"]
            end = file.tell()
        if file is not None:  # without what a killed process wrote of its last line
            file.seek(end)
            file.truncate()

    @property
    def number(self) -> int:
        """Number of records."""
        return len(self._records)

    def clear(self) -> None:
        """Forget all records: they are not what they should be."""
        self._records.clear()

    def part(self, *facts: object) -> str:
        """Return the name of the next part, a hash of its number and of all that its records depend on."""
        self._parts += 1
        return hashlib.sha256(json.dumps([self._parts, *facts], default=str).encode()).hexdigest()[:16]

    def get(self, part: str, *place: object) -> Any:
        return self._records.get(_name(part, place))

    def add(self, record: object, part: str, *place: object) -> None:
        if self._file is None:
            return
        self._records[_name(part, place)] = record
        self._file.write(_line({"at": _name(part, place), "is": record}))
        self._file.flush()


def _line(record: Mapping[str, object]) -> str:
    return json.dumps(record, default=str) + "\n"


def _name(part: str, place: tuple[object, ...]) -> str:
    return "/".join([part, *map(str, place)])


def holds(folder: Path, about: Mapping[str, object]) -> bool:
    """Return True if a folder holds the journal of such a measurement, which no process writes now."""
    with suppress(OSError, ValueError), (folder / UNFINISHED).open(encoding="utf-8") as file:
        return file.readline() == _line(about) and lock(file.fileno()) is not False
    return False


@contextmanager
def keep_journal(folder: Path, about: Mapping[str, object]) -> Iterator[Journal]:
    """Yield the journal in a folder: that of an interrupted measurement about the same, or a new one. It is deleted
    when the measurement is complete."""
    path = folder / UNFINISHED
    goes_on = holds(folder, about)
    with path.open("r+" if goes_on else "w+", encoding="utf-8") as file:
        lock(file.fileno())
        if goes_on:
            file.readline()
        else:
            file.write(_line(about))
            file.flush()
        journal = Journal(file)
        try:
            yield journal
        except BaseException as error:
            if not journal.number or isinstance(error, UserError):
                path.unlink(missing_ok=True)
            elif type(error) is KeyboardInterrupt:
                raise KeyboardInterrupt(f"; {folder} keeps what was measured, and the same command goes on") from None
            raise
        path.unlink(missing_ok=True)
