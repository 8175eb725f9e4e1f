"""Records of data files, each with its file and line, and the conversations in them.

Every error names the file and the line. A conversation is a list under `messages` or `conversations`, or a question
with its answer.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.core.errors import UserError, first_line, shown
from heads.core.files import is_file, read_given
from heads.targets.hub import is_here

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = tuple[str, dict[str, Any]]
"""Pair of `file:line` and the record."""
Message = dict[str, Any]

JSON_FILES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
FORMS = ".jsonl, .json, .jsonl.gz, .json.gz, .parquet or .txt file"

CONVERSATIONS = ("messages", "conversations")
QUESTIONS = ("instruction", "question", "prompt")
ANSWERS = ("response", "output", "answer", "completion")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
ROLES |= {"chatgpt": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "function": "tool"}
WEIGHTS = frozenset(
    ["weight", "train", "training", "trainable", "loss", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask"]
)
"""Names under which turns say whether they are to be trained on: `weight` of OpenAI, Mistral and SlimOrca, `train` and
`training` of axolotl, `trainable` of prime-rl and tinker, `loss` and `loss_scale` of ms-swift, `loss_weight` of
LLaMA-Factory, `step_loss_mask` of slime."""
READ = WEIGHTS | {"role", "from", "content", "value"}
"""Keys of a turn that are read. Chat templates see the other ones."""


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
        remedy = "fetch the file again" if is_file(called) else "without a network, name a file"
        raise UserError(
            f"{called}: no data set that can be loaded, split {arguments['split']} ({reason}{where}); {remedy}"
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
            return read_hub(path, path="parquet", data_files=path, split="train", streaming=True)
        raise UserError(f"{path}: expected a {FORMS}")
    _check_hub_name(path)
    from datasets import config

    # Streaming needs the network, and does not support parts of splits.
    streaming = not config.HF_HUB_OFFLINE and split.isidentifier()
    return read_hub(path, path=path, split=split, streaming=streaming)


def _read_json(file: Path) -> Iterator[Record]:
    """Yield the records of JSON lines one by one, or those of an array, which is read whole."""
    number, found = 0, False
    try:
        with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(BOM_UTF8) if number == 1 else line
                if not found and line.lstrip().startswith(b"["):
                    # The newlines before the array keep the line numbers of errors right.
                    yield from _read_array(file, b"\n" * (number - 1) + line + lines.read())
                    return
                if line.strip():
                    found = True
                    place = f"{file}:{number}"
                    yield place, _check(place, _parse(place, line.strip()), escaped=b"\\u" in line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{file}: broken gzip data after line {number} ({error}); fetch the file again") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); expected a file that this user may read") from None
    if not found:
        raise UserError(f"{file}: the file is empty; expected one JSON record a line")


def _read_array(file: Path, text: bytes) -> Iterator[Record]:
    records = _parse(str(file), text)
    if not records:
        raise UserError(f"{file}: the array is empty; expected JSON records")
    for number, record in enumerate(records, start=1):
        place = f"{file}: record {number}"
        yield place, _check(place, record, escaped=b"\\u" in text)


def _parse(place: str, text: bytes) -> Any:
    try:
        return json.loads(text)
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
    # A table has a name for every turn or for none, and null where a turn did not have it.
    named = WEIGHTS.intersection(*turns) if all(isinstance(turn, dict) for turn in turns) else WEIGHTS
    return [_read_turn(f"{place}: {key}[{n}]", turn, nullable=named) for n, turn in enumerate(turns)]


def read_question(record: Record, key: str) -> str:
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


def _read_turn(place: str, turn: Any, nullable: Collection[str] = ()) -> Message:
    """Return a turn with `role` and `content`, and `weight` 0 if it is an answer that is not to be trained on.
    `nullable`: names of weights of which null says nothing."""
    if not isinstance(turn, dict):
        raise RecordError(f"{place}: expected a turn with 'role' and 'content', got {shown(turn)}", "no turns")
    role, content = (turn.get("role", turn.get("from")), turn.get("content", turn.get("value")))
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(dict.fromkeys(ROLES.values()))
        raise RecordError(f"{place}: expected a role of {known}, got {shown(role)}", f"unknown role {shown(role)}")
    rest = {
        key: value
        for key, value in turn.items()
        if key not in READ and value is not None and (key, value) != ("tool_calls", [])
    }
    if ROLES[role] == "assistant" and not _is_trained(place, turn, nullable):
        rest["weight"] = 0
    if content is None and rest.get("tool_calls"):
        content = ""
    return {**rest, "role": ROLES[role], "content": _text(place, content)}


def _is_trained(place: str, turn: Message, nullable: Collection[str]) -> bool:
    weights = [(name, turn[name]) for name in WEIGHTS & turn.keys() if turn[name] is not None or name not in nullable]
    for name, weight in weights:
        if not isinstance(weight, (bool, int, float)) or weight not in (0, 1):
            got = "null" if weight is None else shown(weight)
            raise RecordError(
                f"{place}: {name}: expected 0 (not to be trained on) or 1, got {got}", "a weight other than 0 or 1"
            )
    return all(weight for _, weight in weights)


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
