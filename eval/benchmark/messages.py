"""Records as conversations: `messages`, `conversations`, or a question with its answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eval.benchmark.records import Record
from heads.errors import UserError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

CONVERSATIONS = ("messages", "conversations")
QUESTIONS = ("instruction", "question", "prompt")
ANSWERS = ("response", "output", "answer", "completion")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
ROLES |= {"chatgpt": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "function": "tool"}


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
