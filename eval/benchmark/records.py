"""Records of data files, each with the place it came from, and the conversations in them.

Every fault is named by file and line. A conversation is `messages`, `conversations`, or a question with its answer.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.files import is_file, read_given
from heads.errors import UserError, first_line, shown
from heads.target.hub import is_here

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = tuple[str, dict[str, Any]]
"""(`file:line`, the record)."""
Message = dict[str, Any]

JSON_FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
FORMS = ".jsonl, .json, .jsonl.gz, .json.gz, .parquet or .txt file"
BLANK = re.compile(r"\s*")
DECODER = json.JSONDecoder()

CONVERSATIONS = ("messages", "conversations")
QUESTIONS = ("instruction", "question", "prompt")
ANSWERS = ("response", "output", "answer", "completion")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
ROLES |= {"chatgpt": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "function": "tool"}


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
            text = read_given(file, "text")
            if not text.strip():
                raise UserError(f"{file}: the file is empty; expected text")
            return iter([(f"{file}:1", {"text": text})])
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
                    place, text = f"{file}:{number}", line.strip()
                    yield place, _check(place, _parse(place, lambda: json.loads(text)), escaped=b"\\u" in line)  # noqa: B023
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


class RecordError(UserError):
    """A record that cannot be used; `reason` says why in words that other records share."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


def read_messages(record: Record) -> list[Message]:
    """The turns of a record in any of the forms that are in use."""
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
    """The turns listed under a key, with roles by the names that chat templates use."""
    place, fields = record
    turns = fields[key]
    if not isinstance(turns, list) or not turns:
        raise RecordError(f"{place}: expected '{key}' to be a list of turns, got {shown(turns)}", "no turns")
    return [_read_turn(f"{place}: {key}[{n}]", turn) for n, turn in enumerate(turns)]


def read_question(record: Record, key: str) -> str:
    """The text of an instruction, followed by the input that some records give it."""
    place, fields = record
    text = _text(f"{place}: {key}", fields[key])
    return f"{text}\n\n{_text(f'{place}: input', fields['input'])}" if fields.get("input") else text


def read_tools(record: Record) -> list[Any] | None:
    """The tools that a conversation may call, as chat templates take them; some records hold them as JSON."""
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
    """The `text` of a record."""
    place, fields = record
    if "text" not in fields:
        raise UserError(f"{place}: expected a record with 'text', got keys {', '.join(sorted(fields)) or 'none'}")
    return _text(f"{place}: text", fields["text"])


def apply_template(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, place: str = "conversation", **options: Any
) -> str:
    """The text that a chat template makes of a conversation. RecordError where the template fails."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # a template is a program: it fails in any of a program's ways
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
    if not isinstance(value, str):
        raise RecordError(f"{place}: expected text, got {shown(value)}", "a turn without text")
    return value
