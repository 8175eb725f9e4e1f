"""Records of data files, each with the place it came from, so that every fault can be named by file and line."""

import gzip
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from eval.files import is_file, read_given
from heads.errors import UserError, first_line, shown
from heads.target.hub import is_here

Record = tuple[str, dict[str, Any]]
"""(`file:line`, the record)."""

JSON_FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
FORMS = ".jsonl, .json, .jsonl.gz, .json.gz, .parquet or .txt file"
BLANK = re.compile(r"\s*")
DECODER = json.JSONDecoder()


def read_records(path: str, *, split: str = "train", limit: int | None = None) -> Iterator[Record]:
    """Records of a file of JSON lines or of a JSON array, of a .txt or .parquet file, or of a data set on the hub."""
    return islice(_read(path, split), limit)


def read_hub(called: str, /, **arguments: Any) -> Iterator[Record]:
    """Records of a data set that `datasets.load_dataset` finds by these arguments; `called` is its name in what is
    said, beside which `arguments` may hold a `name` of their own."""
    from datasets import load_dataset  # only what is not a file here needs the network and a second of imports

    try:
        table = load_dataset(**arguments)
    except Exception as error:  # no such data set, no network, no such split, a broken file: each its own kind
        reason = first_line(error)
        raise UserError(
            f"{called}: no data set that can be loaded, split {arguments['split']} ({reason}); "
            "without a network, name a file"
        ) from None
    return ((f"{called}:{number}", dict(record)) for number, record in enumerate(table, start=1))


def _read(path: str, split: str) -> Iterator[Record]:
    file = Path(path)
    if is_file(file):
        name = file.name.lower()
        if name.endswith(JSON_FILES):
            return _read_json(file)
        if name.endswith(".txt"):
            return iter([(f"{file}:1", {"text": _read_text(file)})])
        if name.endswith(".parquet"):
            return _read_parquet(file)
        raise UserError(f"{path}: expected a {FORMS}")
    if file.is_absolute() or path.count("/") > 1 or file.suffix or is_here(path):
        raise UserError(f"{path}: no such file; expected a {FORMS}, or a hub data set")
    return read_hub(path, path=path, split=split)


def _read_json(file: Path) -> Iterator[Record]:
    number, found = 0, False
    try:
        with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not found and line.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
                    yield from _read_array(file, line + lines.read())
                    return
                if line.strip():
                    found = True
                    yield f"{file}:{number}", _read_line(f"{file}:{number}", line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{file}: broken gzip data after line {number} ({error}); fetch the file again") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); expected a file that this user may read") from None
    if not found:
        raise UserError(f"{file}: the file is empty; expected one JSON record a line")


def _read_array(file: Path, data: bytes) -> Iterator[Record]:
    """The records of an array, parsed one by one: only its text is held whole."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: expected UTF-8 text ({error.reason} at byte {error.start} of the array)") from None

    def skip_blank(at: int) -> int:
        return BLANK.match(text, at).end()  # type: ignore[union-attr]  # matches nothing, too

    count, at = 0, skip_blank(text.index("[") + 1)
    while text[at : at + 1] != "]":
        if count > 0:
            if text[at : at + 1] != ",":
                raise UserError(f"{file}: expected a comma or ] after record {count} of the array")
            at = skip_blank(at + 1)
        count, begin = count + 1, at
        place = f"{file}: record {count}"
        record, at = _parse(place, lambda: DECODER.raw_decode(text, begin))  # noqa: B023 - called at once
        yield place, _check(place, record, escaped="\\u" in text[begin:at])
        at = skip_blank(at)
    if rest := text[at + 1 :].strip():
        raise UserError(f"{file}: expected the end of the file after the array, got {shown(rest)}")
    if count == 0:
        raise UserError(f"{file}: the array is empty; expected JSON records")


def _read_line(place: str, line: bytes) -> dict[str, Any]:
    return _check(place, _parse(place, lambda: json.loads(line.strip())), escaped=b"\\u" in line)


def _parse(place: str, parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: expected UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{place}: expected a JSON record ({error.msg} at {where})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise UserError(f"{place}: expected a JSON record ({first_line(error)})") from None


def _check(place: str, record: Any, *, escaped: bool) -> dict[str, Any]:
    if escaped and not _is_encodable(record):
        raise UserError(f"{place}: expected UTF-8 text, got half of a surrogate pair; write the whole character")
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected a JSON object with keys, got {type(record).__name__}")
    return record


def _is_encodable(record: Any) -> bool:
    """Return False for half a character, which JSON can name, but no text can hold."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_text(file: Path) -> str:
    text = read_given(file, "text")
    if not text.strip():
        raise UserError(f"{file}: the file is empty; expected text")
    return text


def _read_parquet(file: Path) -> Iterator[Record]:
    from datasets import Dataset
    from datasets.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # it says of a broken file what is raised here anyway
    try:
        table = Dataset.from_parquet(str(file))
    except Exception as error:  # pyarrow and datasets raise many kinds for a broken file
        raise UserError(f"{file}: not a readable Parquet file ({first_line(error)}); fetch it again") from None
    finally:
        logging.set_verbosity(level)
    if len(table) == 0:
        raise UserError(f"{file}: the file holds no rows; expected one record a row")
    return ((f"{file}: row {number}", dict(record)) for number, record in enumerate(table, start=1))
