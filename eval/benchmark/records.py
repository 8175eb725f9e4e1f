"""Records of data files, each with its file and line, and the conversations in them.

Every error names the file and the line. A conversation is a list under `messages` or `conversations`, or a question
with its answer.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.errors import UserError, first_line, shown
from heads.files import is_file, read_given
from heads.target.hub import is_here

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = tuple[str, dict[str, Any]]
"""Pair of `file:line` and the record."""
Message = dict[str, Any]

JSON_FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
FORMS = ".jsonl, .json, .jsonl.gz, .json.gz, .parquet or .txt file"
BLANK = re.compile(r"\s*")
DECODER = json.JSONDecoder()
CHUNK = 1 << 20
"""Minimum number of bytes of an array that are read at a time."""
ROWS = 256
"""Number of rows of a Parquet file that are in memory at a time."""
CUT_SHORT = 16
"""Distance from the end of the text read so far, in characters, within which a syntax error may only mean that more
must be read."""

CONVERSATIONS = ("messages", "conversations")
QUESTIONS = ("instruction", "question", "prompt")
ANSWERS = ("response", "output", "answer", "completion")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
ROLES |= {"chatgpt": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "function": "tool"}


def read_records(path: str, *, split: str = "train", limit: int | None = None) -> Iterator[Record]:
    """Return the records of a file of JSON lines or of a JSON array, a .txt or .parquet file, or a data set on the
    hub."""
    return islice(_read(path, split), limit)


def read_hub(called: str, /, **arguments: Any) -> Iterator[Record]:
    """Yield the records of the data set that `datasets.load_dataset` loads with these arguments. `called` is its name
    in messages; it is positional, because `arguments` may contain a `name`."""
    from datasets import load_dataset  # here, because importing it takes a second and local files do not need it

    number = 0
    try:
        for record in load_dataset(**arguments):
            number += 1
            yield f"{called}:{number}", dict(record)
    except Exception as error:  # no such data set, no network, no such split, a broken file: each raises another type
        reason = first_line(error)
        where = f", broken off after record {number}" if number else ""
        raise UserError(
            f"{called}: no data set that can be loaded, split {arguments['split']} ({reason}{where}); "
            "without a network, name a file"
        ) from None


def content_hash(path: str, *, split: str = "train") -> str:
    """Return a hash that changes with the records that `read_records` returns."""
    if is_file(path):
        try:
            with Path(path).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); expected a {FORMS}") from None
    _check_hub_name(path)
    from datasets import load_dataset_builder

    try:
        return f"{load_dataset_builder(path).hash} {split}"
    except Exception as error:  # as above
        raise UserError(
            f"{path}: no data set that can be loaded ({first_line(error)}); without a network, name a file"
        ) from None


def _check_hub_name(path: str) -> None:
    if Path(path).is_absolute() or path.count("/") > 1 or Path(path).suffix or is_here(path):
        raise UserError(f"{path}: no such file; expected a {FORMS}, or a hub data set")


def _read(path: str, split: str) -> Iterator[Record]:
    file = Path(path)
    if is_file(file):
        name = file.name.lower()
        if name.endswith(JSON_FILES):
            return _read_json(file)
        if name.endswith(".txt"):
            text = read_given(file, "text")
            if not text.strip():
                raise UserError(f"{file}: the file is empty; expected text")
            return iter([(f"{file}:1", {"text": text})])
        if name.endswith(".parquet"):
            return _read_parquet(file)
        raise UserError(f"{path}: expected a {FORMS}")
    _check_hub_name(path)
    from datasets import config

    # Streaming needs the network, and does not support parts of splits.
    streaming = not config.HF_HUB_OFFLINE and split.isidentifier()
    return read_hub(path, path=path, split=split, streaming=streaming)


def _read_json(file: Path) -> Iterator[Record]:
    number, found = 0, False
    try:
        with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not found and line.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
                    yield from _read_array(file, line, lines.read)
                    return
                if line.strip():
                    found = True
                    place, text = f"{file}:{number}", line.strip()
                    yield place, _check(place, _parse(place, lambda: json.loads(text)), escaped=b"\\u" in line)  # noqa: B023
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{file}: broken gzip data after line {number} ({error}); fetch the file again") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); expected a file that this user may read") from None
    if not found:
        raise UserError(f"{file}: the file is empty; expected one JSON record a line")


class _Text:
    """Text of a file from the index `at` on. Little more than one record is in memory."""

    def __init__(self, file: Path, opening: bytes, read: Callable[[int], bytes]) -> None:
        self.file, self.read, self.text, self.at = file, read, "", 0
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.bytes, self.ended = 0, False
        """Number of bytes decoded, and True once the file is read to its end."""
        self.lines = self.columns = 0
        """Number of newlines dropped, and of characters dropped from the line in which `text` begins."""
        self._decode(opening)

    def more(self) -> None:
        """Drop the text before `at`, and read as much again as is left (at least CHUNK)."""
        dropped, held = self.text[: self.at], self.text[self.at :]
        *lines, last = dropped.split("\n")
        self.lines, self.columns = self.lines + len(lines), len(last) + (0 if lines else self.columns)
        self.text, self.at = held, 0
        self._decode(self.read(max(CHUNK, len(held))))

    def _decode(self, data: bytes) -> None:
        self.ended = not data
        try:
            self.text += self.decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            at = self.bytes + error.start
            raise UserError(f"{self.file}: expected UTF-8 text ({error.reason} at byte {at} of the array)") from None
        self.bytes += len(data)

    def next_character(self) -> str:
        """Move `at` past blanks. Return the character there; empty at the end of the file."""
        while True:
            self.at = BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]  # matches nothing, too
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()

    def record(self) -> tuple[Any, bool]:
        """Return the JSON value at `at`, and True if its text has \\u escapes. Raise ValueError or RecursionError if
        there is no value."""
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                begun = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - CUT_SHORT
                if not begun or self.ended:
                    error.colno += self.columns if error.lineno == 1 else 0
                    error.lineno += self.lines
                    raise
                self.more()
                continue
            if end < len(self.text) or self.ended:  # else a number may continue
                escaped, self.at = "\\u" in self.text[self.at : end], end
                return value, escaped
            self.more()


def _read_array(file: Path, opening: bytes, read: Callable[[int], bytes]) -> Iterator[Record]:
    """Yield the records of an array, parsed one by one as they are read."""
    text = _Text(file, opening, read)
    text.next_character()
    text.at += 1
    count = 0
    while (character := text.next_character()) != "]":
        if count > 0:
            if character != ",":
                raise UserError(f"{file}: expected a comma or ] after record {count} of the array")
            text.at += 1
            text.next_character()
        count += 1
        place = f"{file}: record {count}"
        record, escaped = _parse(place, text.record)
        yield place, _check(place, record, escaped=escaped)
    text.at += 1
    if text.next_character():
        raise UserError(
            f"{file}: expected the end of the file after the array, got {shown(text.text[text.at :].strip())}"
        )
    if count == 0:
        raise UserError(f"{file}: the array is empty; expected JSON records")


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
    try:
        if escaped:  # JSON can name half a character, but no text can hold it
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        got = "half of a surrogate pair; write the whole character"
        raise UserError(f"{place}: expected UTF-8 text, got {got}") from None
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected a JSON object with keys, got {type(record).__name__}")
    return record


def _read_parquet(file: Path) -> Iterator[Record]:
    from pyarrow import ArrowException, parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{file}: row {number}", record
    except (ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable Parquet file ({first_line(error)}); fetch it again") from None
    if number == 0:
        raise UserError(f"{file}: the file holds no rows; expected one record a row")


class RecordError(UserError):
    """Error of a record that cannot be used. `reason` is a general description, the same for all such records."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


def read_messages(record: Record) -> list[Message]:
    """Return the turns of a record in any of the common formats."""
    place, fields = record
    key = next((key for key in CONVERSATIONS if key in fields), None)
    if key is not None:
        return read_turns(record, key)
    question = next((key for key in QUESTIONS if key in fields), None)
    answer = next((key for key in ANSWERS if key in fields), None)
    if question is None or answer is None:
        expected = "'messages', 'conversations', or 'instruction' with 'response'"
        got = ", ".join(sorted(fields)) or "none"
        raise RecordError(f"{place}: expected a record with {expected}, got keys {got}", "no conversation")
    return [
        {"role": "user", "content": read_question(record, question)},
        {"role": "assistant", "content": _text(f"{place}: {answer}", fields[answer])},
    ]


def read_turns(record: Record, key: str) -> list[Message]:
    """Return the turns listed under a key, with the names of roles that chat templates use."""
    place, fields = record
    turns = fields[key]
    if not isinstance(turns, list) or not turns:
        raise RecordError(f"{place}: expected '{key}' to be a list of turns, got {shown(turns)}", "no turns")
    return [_read_turn(f"{place}: {key}[{n}]", turn) for n, turn in enumerate(turns)]


def read_question(record: Record, key: str) -> str:
    """Return the text of an instruction, followed by the `input` that some records have."""
    place, fields = record
    text = _text(f"{place}: {key}", fields[key])
    return f"{text}\n\n{_text(f'{place}: input', fields['input'])}" if fields.get("input") else text


def read_tools(record: Record) -> list[Any] | None:
    """Return the tools that a conversation may call, as chat templates expect them. Some records have them as JSON
    text."""
    place, fields = record
    tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except (ValueError, RecursionError):
            raise RecordError(f"{place}: tools: expected JSON, got {shown(tools)}", "unreadable tools") from None
    if tools is not None and not isinstance(tools, list):
        raise RecordError(f"{place}: tools: expected a list, got {shown(tools)}", "unreadable tools")
    return tools or None


def read_text(record: Record) -> str:
    """Return the `text` of a record."""
    place, fields = record
    if "text" not in fields:
        raise UserError(f"{place}: expected a record with 'text', got keys {', '.join(sorted(fields)) or 'none'}")
    return _text(f"{place}: text", fields["text"])


def apply_template(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, place: str = "conversation", **options: Any
) -> str:
    """Return a conversation rendered with the chat template. Raise RecordError if the template fails."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # a template is a program, and may raise anything
        what = f"turns 1 to {len(messages)}" if messages else "an empty conversation"
        said = str(error) or type(error).__name__
        raise RecordError(
            f"{place}: the chat template refuses {what} ({said}); mend the record or the template",
            "refused by the chat template",
        ) from None


def _read_turn(place: str, turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RecordError(f"{place}: expected a turn with 'role' and 'content', got {shown(turn)}", "no turns")
    role, content = (turn.get("role", turn.get("from")), turn.get("content", turn.get("value")))
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(dict.fromkeys(ROLES.values()))
        raise RecordError(f"{place}: expected a role of {known}, got {shown(role)}", f"unknown role {shown(role)}")
    rest = {
        key: value
        for key, value in turn.items()
        if key not in ("role", "from", "content", "value") and value is not None and (key, value) != ("tool_calls", [])
    }
    if content is None and rest.get("tool_calls"):
        content = ""
    return {**rest, "role": ROLES[role], "content": _text(place, content)}


def _text(place: str, value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    if isinstance(value, list) and any(isinstance(part, dict) and part.get("type", "text") != "text" for part in value):
        raise RecordError(
            f"{place}: images and other media are not supported, got {shown(value)}", "images, which are not supported"
        )
    if not isinstance(value, str):
        raise RecordError(f"{place}: expected text, got {shown(value)}", "a turn without text")
    return value
