"""Records of data files, each with its file and line, which every error names."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from glob import glob
from itertools import chain, islice, takewhile
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from heads.core.errors import UserError, first_line, shown
from heads.core.files import file_hash, is_file, read_given
from heads.targets.hub import is_here

Record = tuple[str, dict[str, Any]]
"""Pair of `file:line` and the record."""
Message = dict[str, Any]

JSON_FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
FILES = (*JSON_FILES, ".parquet", ".txt")
EXPECTED = "a .jsonl, .json, .jsonl.gz, .json.gz, .parquet or .txt file, a folder or a pattern of such files"
PATTERN = re.compile(r"[*?\[]")
MAX_NAMES = 8
"""Number of files to name that are not read."""
FETCH, NAME = "fetch it again", "check its name, subset and split, and the network, or name a file"
"""What to do about a data set that cannot be loaded: a local one, and one on the hub."""


def read_records(
    path: str, *, subset: str | None = None, split: str = "train", limit: int | None = None
) -> Iterator[Record]:
    """Return the records of a file of JSON lines or of a JSON array, a .txt or .parquet file; of the files of a folder
    or of a pattern that belong to the split, by name; of a folder that `datasets` saved; or of a data set on the hub.
    NaN stands for null."""
    return islice(_read(path, subset, split), limit)


def read_hub(called: str, /, **arguments: object) -> Iterator[Record]:
    """Yield the records of the data set that `datasets.load_dataset` loads with these arguments. `called` is its name
    in messages; it is positional, because `arguments` may contain a `name`."""

    subset = f", subset {arguments['name']}" if arguments.get("name") else ""
    return _read_rows(called, f"{subset}, split {arguments['split']}", NAME, "load_dataset", **arguments)


def content_hash(path: str, *, subset: str | None = None, split: str = "train") -> str:
    """Return a hash that changes with the records that `read_records` returns."""
    saved = _saved(path, split)
    if files := _files(path, subset, split).read if saved is None else sorted(filter(is_file, saved.iterdir())):
        content = hashlib.sha256()
        for file in files:
            content.update(file.suffix.encode())
            try:
                content.update(bytes.fromhex(file_hash(file)))
            except OSError as error:
                raise UserError(f"{file}: cannot be read ({error.strerror}); expected {EXPECTED}") from None
        return content.hexdigest()
    _check_hub_name(path)
    from datasets import load_dataset_builder

    try:
        return f"{load_dataset_builder(path, subset).hash} {subset} {split}"
    except Exception as error:  # as below
        raise UserError(f"{path}: no data set that can be loaded ({_reason(error)}); {NAME}") from None


def is_local(path: str) -> bool:
    return is_here(path) or PATTERN.search(path) is not None


def has_splits(path: str) -> bool:
    """Return False for a file, and for a data set that `datasets` saved alone."""
    return not is_file(path) and not is_file(Path(path) / "state.json")


def has_subsets(path: str | Path) -> bool:
    """Return True for a folder with the card of a data set that lists its files."""
    card = Path(path) / "README.md"
    return is_file(card) and re.match(r"---\n(.*\n)?configs:", read_given(card, "text"), re.DOTALL) is not None


def describe_unread(path: str, *, subset: str | None = None, split: str = "train") -> list[str]:
    """Return the line on the files of a folder or of a pattern that `read_records` does not read, if there are some."""
    if _saved(path, split) is not None:
        return []
    folder, _, others = _files(path, subset, split)
    if not others:
        return []
    names = ", ".join(str(file.relative_to(folder)) for file in others[:MAX_NAMES])
    rest = f" and {len(others) - MAX_NAMES} others" if len(others) > MAX_NAMES else ""
    return [f"files that are not of the split {split} are not read: {names}{rest}"]


def _check_hub_name(path: str) -> None:
    if Path(path).is_absolute() or path.count("/") > 1 or Path(path).suffix or is_here(path):
        raise UserError(f"{path}: no such file; expected {EXPECTED}, or a hub data set")


class _Files(NamedTuple):
    folder: Path
    read: list[Path]
    others: list[Path]
    """Files of records in the folder that are not read."""


def _files(path: str, subset: str | None, split: str) -> _Files:
    """Return the file of a path, or those files of a folder or of a pattern that belong to a split, by name. Files that
    hold no records, such as a README, are passed over."""
    if is_file(path):
        return _Files(Path(path).parent, [Path(path)], [])
    is_pattern = PATTERN.search(path) is not None
    if is_pattern:
        folder = Path(*takewhile(lambda part: not PATTERN.search(part), Path(path).parts))
        files = [Path(name) for name in sorted(glob(path, recursive=True)) if is_file(name)]
    elif is_here(path):
        folder = Path(path)
        files = sorted(file for file in folder.rglob("*") if _is_data(file, folder))
    else:
        return _Files(Path(path), [], [])
    if not files:
        raise UserError(f"{path}: no file there; expected {EXPECTED}")
    splits = _splits(folder, files, subset)
    chosen = files if is_pattern and len(splits) == 1 else splits.get(split)
    if not chosen:
        raise UserError(f"{path}: no split {split} among its files; it has {', '.join(splits)}; name one with split")
    kinds = sorted({_kind(file) or file.suffix for file in chosen})
    if len(kinds) > 1:
        raise UserError(
            f"{path}: expected files of one form, got {' and '.join(kinds)}; name those of one form by a pattern, such "
            f"as *{kinds[0]}"
        )
    return _Files(folder, chosen, [file for file in files if file not in chosen])


def _is_data(file: Path, folder: Path) -> bool:
    """Return True for a file of records in a folder, where `datasets` does not pass it over."""
    from datasets.data_files import FILES_TO_IGNORE

    is_hidden = any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)
    return is_file(file) and _kind(file) is not None and not is_hidden and file.name not in FILES_TO_IGNORE


def _splits(folder: Path, files: Sequence[Path], subset: str | None) -> dict[str, list[Path]]:
    """Return the files of each split, as `datasets.load_dataset` finds them: by the card of the data set if it lists
    them, else by the names of files and folders."""
    from datasets import load_dataset_builder
    from datasets.data_files import _get_data_files_patterns

    if has_subsets(folder):
        try:
            listed = load_dataset_builder(str(folder), subset).config.data_files or {}
        except Exception as error:  # a card that cannot be read, no such subset: each raises another type
            raise UserError(f"{folder}: README.md lists no such files ({_reason(error)}); name its subset") from None
        place = folder.expanduser().resolve()
        splits = {}
        for split, chosen in listed.items():
            splits[str(split)] = sorted(folder / Path(file).relative_to(place) for file in set(chosen))
        return splits
    names = {file: file.relative_to(folder).as_posix() for file in files}

    def matching(pattern: str) -> list[str]:
        return [name for name in names.values() if fnmatchcase(name, pattern) or fnmatchcase(f"/{name}", pattern)]

    splits = {}
    for split, patterns in _get_data_files_patterns(matching).items():
        matched = set(chain.from_iterable(map(matching, patterns)))
        splits[str(split)] = [file for file in files if names[file] in matched]
    return splits


def _kind(file: Path) -> str | None:
    return next((ending for ending in FILES if file.name.lower().endswith(ending)), None)


def _saved(path: str, split: str) -> Path | None:
    """Return the folder of a data set that `datasets` saved to disk, or None. A saved dictionary of data sets has a
    folder for each split."""
    if is_file(Path(path) / "dataset_dict.json"):
        if not is_file(Path(path) / split / "state.json"):
            known = ", ".join(sorted(folder.name for folder in Path(path).iterdir() if folder.is_dir()))
            raise UserError(f"{path}: no split {split}; it has {known}")
        return Path(path) / split
    return Path(path) if is_file(Path(path) / "state.json") else None


def _read(path: str, subset: str | None, split: str) -> Iterator[Record]:
    if (saved := _saved(path, split)) is not None:
        return _read_rows(path, "", FETCH, "load_from_disk", dataset_path=str(saved))
    if is_file(path):
        return _read_file(Path(path), path)
    folder, files, _ = _files(path, subset, split)
    if files:
        return chain.from_iterable(_read_file(file, f"{path}: {file.relative_to(folder)}") for file in files)
    _check_hub_name(path)
    from datasets import config

    # Streaming needs the network, and does not support parts of splits.
    streaming = not config.HF_HUB_OFFLINE and split.isidentifier()
    return read_hub(path, path=path, name=subset, split=split, streaming=streaming)


def _read_file(file: Path, called: str) -> Iterator[Record]:
    """Return the records of a file that is `called` so in their places."""
    kind = _kind(file)
    if kind in JSON_FILES:
        return _read_json(file, called)
    if kind == ".txt":
        text = read_given(file, "text")
        if not text.strip():
            raise UserError(f"{called}: the file is empty; expected text")
        return iter([(f"{called}:1", {"text": text})])
    if kind == ".parquet":
        arguments: dict[str, object] = {"path": "parquet", "data_files": str(file), "split": "train", "streaming": True}
        return _read_rows(called, "", FETCH, "load_dataset", **arguments)
    raise UserError(f"{called}: expected {EXPECTED}")


def _read_rows(called: str, of: str, remedy: str, load: str, /, **arguments: object) -> Iterator[Record]:
    """Yield the rows of the data set that a function of `datasets` loads."""
    import datasets  # here, because importing it takes a second and local files do not need it

    number = 0
    try:
        for record in getattr(datasets, load)(**arguments):
            number += 1
            yield f"{called}:{number}", {key: _without_nulls(value) for key, value in record.items()}
    except Exception as error:  # no such data set, no network, no such split, a broken file: each raises another type
        where = f", broken off after record {number}" if number else ""
        raise UserError(f"{called}: no data set that can be loaded{of} ({_reason(error)}{where}); {remedy}") from None


def _without_nulls(value: object) -> object:
    """Return a value of a table without the nulls of its structs: a column has one type for all rows, so that each
    struct has the keys of all others. NaN stands for null, too."""
    if isinstance(value, dict):
        plain = {key: _without_nulls(part) for key, part in value.items()}
        return {key: part for key, part in plain.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return None if isinstance(value, float) and isnan(value) else value


def _reason(error: Exception) -> str:
    lacks_subset = str(error).startswith("Config name is missing")  # the next line lists them
    return " ".join(str(error).splitlines()[:2]) if lacks_subset else first_line(error)


def _read_json(file: Path, called: str) -> Iterator[Record]:
    """Yield the records of JSON lines one by one, or those of an array, which is read whole."""
    number = 0
    is_empty = True
    try:
        with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(BOM_UTF8) if number == 1 else line
                if is_empty and line.lstrip().startswith(b"["):
                    # The newlines before the array keep the line numbers of errors right.
                    yield from _read_array(called, b"\n" * (number - 1) + line + lines.read())
                    return
                if line.strip():
                    is_empty = False
                    place = f"{called}:{number}"
                    yield place, _check(place, _parse(place, line.strip()), escaped=b"\\u" in line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{called}: broken gzip data after line {number} ({error}); fetch the file again") from None
    except OSError as error:
        raise UserError(
            f"{called}: cannot be read ({error.strerror}); expected a file that this user may read"
        ) from None
    if is_empty:
        raise UserError(f"{called}: the file is empty; expected one JSON record a line")


def _read_array(called: str, text: bytes) -> Iterator[Record]:
    records = _parse(called, text)
    if not records:
        raise UserError(f"{called}: the array is empty; expected JSON records")
    for number, record in enumerate(records, start=1):
        place = f"{called}: record {number}"
        yield place, _check(place, record, escaped=b"\\u" in text)


def _parse(place: str, text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=lambda name: None if name == "NaN" else float(name))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: expected UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # "Unterminated string starting at"
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{place}: expected a JSON record ({what} at {where})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise UserError(f"{place}: expected a JSON record ({first_line(error)})") from None


def _check(place: str, record: object, *, escaped: bool) -> dict[str, object]:
    try:
        if escaped:  # JSON can name half a character, but no text can hold it
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        got = "half of a surrogate pair; write the whole character"
        raise UserError(f"{place}: expected UTF-8 text, got {got}") from None
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected a JSON object with keys, got {type(record).__name__}")
    return record


class RecordError(UserError):
    """Error of a record that cannot be used. `reason` is a general description, the same for all such records."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


def read_text(record: Record) -> str:
    place, fields = record
    if "text" not in fields:
        raise UserError(f"{place}: expected a record with 'text', got keys {', '.join(sorted(fields)) or 'none'}")
    if not isinstance(fields["text"], str):
        raise UserError(f"{place}: text: expected text, got {shown(fields['text'])}")
    return fields["text"]
