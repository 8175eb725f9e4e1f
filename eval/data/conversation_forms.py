"""Conversations in records of the common forms.

The form of a record follows from its columns: turns (`FORMS`), or a question with its answer. A system prompt, a
history and tools may have columns of their own.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from eval.data.data_files import Message, Record, RecordError
from heads.core.errors import shown

NAMES_OF_ROLES = {
    "user": "user human prompter",
    "assistant": "assistant ai_assistant gpt chatgpt model ai llm bot chatbot bing bard claude",
    "system": "system developer",
    "tool": "tool function observation ipython tool_response function_response",
}
ROLES = {name: role for role, names in NAMES_OF_ROLES.items() for name in names.split()}
"""The roles of chat templates by the names that records have for them, in any case, without the signs around them."""
WEIGHTS = frozenset(
    ["weight", "train", "training", "trainable", "loss", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask"]
)
"""Names under which turns say whether they are to be trained on: `weight` of OpenAI, Mistral and SlimOrca, `train` and
`training` of axolotl, `trainable` of prime-rl and tinker, `loss` and `loss_scale` of ms-swift, `loss_weight` of
LLaMA-Factory, `step_loss_mask` of slime."""
ROLE, CONTENT = ("role", "from"), ("content", "value")
READ = WEIGHTS | {*ROLE, *CONTENT}
"""Keys of a turn that are read. Chat templates see the other ones."""
NO_CONVERSATION = "no conversation"
"""Reason of a record whose columns have no form of a conversation."""
CALL = "function_call"
"""Role of a turn, or key of a turn, that calls a tool."""
CALLS = re.compile(r"((?:\s*<(?P<tag>\w+)>.*?</(?P=tag)>)?)(.*)", re.DOTALL)
"""Matches the text of such a turn: reasoning in tags, if any, and the calls."""
TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
"""Types of content parts with text."""
MEDIA = re.compile("(input_)?(image|audio|video|file)")
"""Matches types of content parts that are no objects to be given as JSON, where a part stands alone."""
THOUGHTS = ("thinking", "reasoning", "reasoning_content")
"""Types of content parts with reasoning, and fields that have its text."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a turn in which records store the reasoning before an answer."""
FINISH = "finish_reason"
"""Key of an answer, or column of a record for its last one: why a server ended it."""
ARGUMENTS = "chat_template_kwargs"
"""Column with arguments of the chat template for its record alone."""
TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|User|Assistant):")
"""Names of the speakers in one text of a conversation, as Anthropic's preference data have it."""

Form = tuple[str, ...]
"""The column of a conversation's turns, or the columns of its first turns and of its last ones."""
TURNS = ("messages", "conversations", "conversation", "data")
"""Columns with turns."""
QUESTIONS = ("instruction", "question", "prompt", "query", "input")
"""Columns with a question, or with the turns before the last answer."""
BEHIND = ("input", "context")
"""Columns with text that follows a question, as those of Alpaca and of Dolly."""
ANSWERS = ("response", "output", "answer", "completion", "chosen", "preferred_output")
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions", "tool_defs", "available_tools")
"""Columns with the tools that an answer may call; the last two are those of verifiers and of Toucan."""
CONTEXT = (*SYSTEM, "history", *TOOLS, ARGUMENTS, FINISH)
"""Columns that are read in every form."""


class Chat(NamedTuple):
    """The conversation of a record."""

    messages: list[Message]
    tools: list[object] | None
    """The tools that it may call, as chat templates expect them."""
    form: str
    """The columns of the conversation."""
    unread: tuple[str, ...]
    """Columns with text, lists or mappings that the form does not read."""
    notes: tuple[str, ...] = ()
    """What is worth saying of it, in general words, the same for all such records."""
    arguments: Mapping[str, object] = {}
    """Arguments of the chat template for this record."""


@lru_cache(maxsize=1024)
def _forms(columns: tuple[str, ...]) -> list[Form]:
    """Return the forms of a record with these columns."""
    turns = [(key,) for key in TURNS if key in columns]
    questions = [key for key in QUESTIONS[:-1] if key in columns] or [key for key in QUESTIONS[-1:] if key in columns]
    answers = [key for key in ANSWERS if key in columns]
    if "chosen" in answers and not questions:  # of a preference set: after the turns, or whole conversations
        return [(key, "chosen") for (key,) in turns] or [("chosen",)]
    return [*turns, *((question, answer) for question in questions for answer in answers)]


def read_chat(record: Record) -> Chat:
    """Return the conversation of a record in any of the common forms. Leading answers, which no prompt asks for, are
    dropped. RecordError for a record without a conversation, or with two."""
    place, fields = record = with_lists(record)
    if fields.get("label") is False or fields.get("kto_tag") is False:
        raise RecordError(f"{place}: its label says that its answer is bad", "an answer that its label calls bad")
    columns = tuple(key for key, value in fields.items() if value and (key not in TURNS or isinstance(value, list)))
    forms = _forms(columns) or _forms(tuple(fields))  # the latter of empty columns
    if not forms:
        expected = "a record with 'messages', 'conversations', or 'instruction' with 'response'"
        keys = ", ".join(sorted(fields)) or "none"
        remedy = "; kind text reads texts" if isinstance(fields.get("text"), str) else ""
        raise RecordError(f"{place}: expected {expected}, got keys {keys}{remedy}", NO_CONVERSATION)
    messages: list[Message] = []
    for first, *last in forms:
        turns = read_turns(record, first)
        if last:
            answer = read_turns(record, last[0], "assistant")
            is_next = answer[0]["role"] == "assistant" != turns[-1]["role"]
            if is_next and _is_transcript(fields[first]):
                answer[0]["content"] = answer[0]["content"].strip()
            # Some preference sets repeat the prompt in each answer.
            turns = [*turns, *answer] if is_next else _longer(place, forms, turns, answer)
        messages = _longer(place, forms, messages, turns)
    messages, notes = with_context(record, messages)
    if fields.get(FINISH) and messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault(FINISH, fields[FINISH])
    read = {*CONTEXT, *(key for form in forms for key in form)}
    if any(isinstance(fields[form[0]], str) for form in forms):
        read |= {key for key in BEHIND if isinstance(fields.get(key), str)}
    if all(isinstance(fields[form[-1]], str) and len(form) == 2 for form in forms):
        thoughts = [fields[key] for key in REASONING if isinstance(fields.get(key), str) and fields[key]]
        if thoughts and messages[-1].keys().isdisjoint(REASONING):
            messages[-1] = {**messages[-1], REASONING[0]: thoughts[0]}
        read |= {*REASONING}
    unread = [
        key for key, value in fields.items() if key not in read and value and isinstance(value, str | list | dict)
    ]
    tools = read_tools(record, messages)
    return Chat(messages, tools, ", ".join(forms[0]), tuple(unread), notes, read_arguments(record))


def with_lists(record: Record) -> Record:
    """Return a record in which columns of turns that are JSON text are lists, and xLAM's calls are an answer."""
    place, fields = record

    def read(column: str, *keys: str) -> list[object]:
        items = _parsed(fields[column]) if isinstance(fields.get(column), str) else None
        items = items if isinstance(items, list) else []
        return items if all(isinstance(item, dict) and not item.keys().isdisjoint(keys) for item in items) else []

    turns = {column: items for column in TURNS if (items := read(column, *ROLE))}
    if calls := read("answers", "name"):
        fields = {key: value for key, value in fields.items() if key != "answers"}
        turns["completion"] = [{"role": "assistant", CALL: calls}]
    return place, fields | turns


def _longer(place: str, forms: Sequence[Form], a: list[Message], b: list[Message]) -> list[Message]:
    """Return the longer of two conversations, which begins with the other one."""
    one = [(turn["role"], turn["content"]) for turn in a if turn["role"] != "system"]
    other = [(turn["role"], turn["content"]) for turn in b if turn["role"] != "system"]
    if any(mine != theirs for mine, theirs in zip(one, other, strict=False)):
        columns = " and in ".join(" with ".join(form) for form in forms)
        raise RecordError(
            f"{place}: expected one conversation, got two that differ, in {columns}; remove the columns of one",
            "two forms at once",
        )
    return max(a, b, key=len)


def _unexpected(place: str, expected: str, got: object, reason: str) -> RecordError:
    return RecordError(f"{place}: expected {expected}, got {shown(got)}", reason)


def _parsed(value: object) -> object:
    """Return what a JSON text holds, and any other value unchanged."""
    with suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def read_turns(record: Record, column: str, role: str = "user") -> list[Message]:
    """Return the turns in a column, with the names of roles that chat templates use. `role`: that of a text, and of the
    first in a list of texts, which take turns."""
    place, fields = record
    turns = fields[column]
    place = f"{place}: {column}"
    if isinstance(turns, dict) and "messages" in turns:  # the input of OpenAI's preferences
        turns = turns["messages"]
    turns = _as_list(turns, *ROLE, *CONTENT)
    if isinstance(turns, dict) and not turns.keys().isdisjoint(ROLE):
        turns = [turns]
    if role == "assistant" and column not in TURNS and isinstance(turns, list) and not any(map(_is_turn, turns)):
        turns = json.dumps(turns, ensure_ascii=False) if turns else turns
    if isinstance(turns, list) and turns:
        if isinstance(turns[0], str):
            others = {"user": "assistant", "assistant": "user"}
            return [
                {"role": role if n % 2 == 0 else others[role], "content": _text(f"{place}[{n}]", turn)}
                for n, turn in enumerate(turns)
            ]
        # A table has a name for every turn or for none, and null where a turn did not have it.
        named = WEIGHTS.intersection(*turns) if all(isinstance(turn, dict) for turn in turns) else WEIGHTS
        return [_read_turn(f"{place}[{n}]", turn, nullable=named) for n, turn in enumerate(turns)]
    if column in TURNS or isinstance(turns, list):
        raise _unexpected(place, "a list of turns", turns, "no turns")
    if role == "assistant" and turns is None:
        raise RecordError(f"{place}: expected an answer, got none", "without an answer")
    text = _text(place, turns)
    if _is_transcript(text) and (role == "user" or any(_is_transcript(fields.get(key)) for key in QUESTIONS)):
        _, *parts = TRANSCRIPT.split(text.strip())
        speeches = [*zip(parts[::2], map(str.strip, parts[1::2]), strict=True)]
        if speeches[-1] == ("Assistant", ""):  # it asks for the answer
            speeches.pop()
        return [{"role": ROLES[name.lower()], "content": content} for name, content in speeches]
    for key in BEHIND:
        if role == "user" and column not in BEHIND and isinstance(fields.get(key), str) and fields[key]:
            text = f"{text}\n\n{fields[key]}"
    return [{"role": role, "content": text}]


def _is_turn(value: object) -> bool:
    keys = {*ROLE, *CONTENT, "type", "text"}
    return isinstance(value, str) or (isinstance(value, dict) and not value.keys().isdisjoint(keys))


def _as_list(value: Any, *keys: str) -> object:
    """Return a mapping of lists that has one of the keys as a list of mappings, from which `datasets` makes it, and any
    other value unchanged."""
    is_mapping = isinstance(value, dict) and not value.keys().isdisjoint(keys)
    lists = {key: part for key, part in value.items() if part is not None} if is_mapping else {}
    if lists and all(isinstance(part, list) for part in lists.values()) and len(set(map(len, lists.values()))) == 1:
        rows = []
        for row in zip(*lists.values(), strict=True):
            rows.append({key: part for key, part in zip(lists, row, strict=True) if part is not None})
        return rows
    return value


def _is_transcript(text: object) -> bool:
    return isinstance(text, str) and text.lstrip().startswith(("Human:", "User:")) and "\n\nAssistant:" in text


def read_arguments(record: Record) -> Mapping[str, object]:
    """Return the arguments of the chat template that a record has, as a mapping or as JSON text."""
    place, fields = record
    arguments = _parsed(fields.get(ARGUMENTS) or {}) or {}
    if not isinstance(arguments, dict):
        what = "a mapping, or one as JSON"
        raise _unexpected(f"{place}: {ARGUMENTS}", what, arguments, "unreadable arguments of the chat template")
    return arguments


def with_context(record: Record, messages: list[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """Return a record's conversation with the system prompt and the history of their own columns, without leading
    answers, and what was done to it."""
    place, fields = record
    systems = {_text(f"{place}: {key}", fields[key]): key for key in SYSTEM if fields.get(key)}
    system, rest = (messages[:1], messages[1:]) if messages and messages[0]["role"] == "system" else ([], messages)
    if system and system[0]["content"]:
        systems[system[0]["content"]] = "the turns"
    if len(systems) > 1:
        places = " and in ".join(systems.values())
        raise RecordError(
            f"{place}: expected one system prompt, got two that differ, in {places}", "two system prompts"
        )
    if systems:
        system = [{"role": "system", "content": text} for text in systems]
    if history := fields.get("history"):
        is_pairs = isinstance(history, list) and all(
            isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in history
        )
        if not is_pairs:
            what = "a list of pairs of a question and its answer"
            reason = "a history that is no list of pairs"
            raise _unexpected(f"{place}: history", what, history, reason)
        roles = ("user", "assistant")
        past = [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)]
        rest = [*past, *rest]
    speakers = [message["role"] for message in rest]
    start = next((n for n, role in enumerate(speakers) if role in ("user", "system")), len(rest))
    notes = []
    if start > 0:
        notes.append("records begin with an answer, which is dropped")
    if ("user", "user") in pairwise(speakers):
        notes.append("records have turns of the user without an answer between them, which are one prompt")
    return [*system, *rest[start:]], tuple(notes)


def read_tools(record: Record, messages: Sequence[Message]) -> list[object] | None:
    """Return the tools of a conversation, which some records have as JSON text, in the form of OpenAI's protocol."""
    place, fields = record
    tools = _as_list(next((fields[key] for key in TOOLS if fields.get(key)), None), "function", "name")
    if tools is None and isinstance(fields.get("input"), dict):
        tools = fields["input"].get("tools")
    tools = _parsed(tools)
    tools = [*map(_parsed, tools)] if isinstance(tools, list) else tools
    # Hermes' files also have them in the system prompt.
    if not tools or (messages and "<tools>" in messages[0]["content"]):
        return None
    if not isinstance(tools, list):
        raise _unexpected(f"{place}: tools", "a list, or one as JSON", tools, "unreadable tools")
    return [
        {"type": "function", "function": tool} if isinstance(tool, dict) and "name" in tool else tool for tool in tools
    ]


def _read_turn(place: str, turn: object, nullable: Collection[str] = ()) -> Message:
    """Return a turn with `role` and `content`, and `weight` 0 if it is an answer that is not to be trained on.
    `nullable`: names of weights of which null says nothing."""
    if not isinstance(turn, dict):
        raise _unexpected(place, "a turn with 'role' and 'content'", turn, "no turns")
    name = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    role = re.sub(r"[\W_]+", "_", name.lower()).strip("_0123456789") if isinstance(name, str) else ""
    if role in (CALL, "tool_call"):
        found = CALLS.match(content) if isinstance(content, str) else None
        turn = {**turn, CALL: content if found is None else found[3]}
        role = "assistant"
        content = None if found is None else found[1].strip() or None
    if role not in ROLES:
        raise _unexpected(place, f"a role of {', '.join(NAMES_OF_ROLES)}", name, f"unknown role {shown(name)}")
    message = {key: value for key, value in turn.items() if key not in READ and value is not None}
    if CALL in message:  # also a key of OpenAI's turns, before there were tools
        message["tool_calls"] = _read_calls(place, message.pop(CALL))
    if calls := _as_list(_parsed(message.pop("tool_calls", None)), "function", "name"):
        calls = [calls] if isinstance(calls, dict) else calls
        message["tool_calls"] = [*map(_parsed, calls)] if isinstance(calls, list) else calls
    if ROLES[role] == "assistant":
        if not _is_trained(place, turn, nullable):
            message["weight"] = 0
        content, thoughts = _without_thoughts(place, content)
        has_reasoning = any(message.get(key) for key in REASONING)
        if thoughts and not has_reasoning:
            message[REASONING[0]] = thoughts
        if content in (None, []):
            if not message.get("tool_calls"):
                if thoughts or has_reasoning:
                    what = "expected an answer, got its reasoning alone"
                    raise RecordError(f"{place}: {what}", "with reasoning but no answer")
                raise RecordError(f"{place}: expected an answer, got none", "without an answer")
            content = ""
    return {**message, "role": ROLES[role], "content": _text(place, content)}


def _thought(part: Mapping[str, object]) -> object:
    return next((part[key] for key in (*THOUGHTS, "text", "summary") if part.get(key)), "")


def _without_thoughts(place: str, content: object) -> tuple[object, str]:
    """Return the content of an answer without its parts of reasoning, and their text."""
    parts = _as_list(content, "type")
    if not isinstance(parts, list):
        return content, ""
    thoughts = [part for part in parts if isinstance(part, dict) and part.get("type") in THOUGHTS]
    texts = [_thought(part) for part in thoughts]
    rest = [part for part in parts if part not in thoughts]
    return rest, "\n\n".join(_text(place, text) for text in texts if text)


def _is_trained(place: str, turn: Message, nullable: Collection[str]) -> bool:
    weights = {name: turn[name] for name in WEIGHTS & turn.keys() if turn[name] is not None or name not in nullable}
    for name, weight in weights.items():
        if not isinstance(weight, bool | int | float) or weight not in (0, 1):
            what = "0 (not to be trained on) or 1"
            raise _unexpected(f"{place}: {name}", what, weight, "a weight other than 0 or 1")
    return all(weights.values())


def _read_calls(place: str, text: object) -> list[object]:
    """Return the calls of tools in a turn of ShareGPT's: JSON text of one or of several, with name and arguments."""
    calls = _parsed(text)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise _unexpected(place, "a call as JSON with name and arguments", text, "unreadable tool calls")
    return [{"type": "function", "function": call} for call in calls]


def _text(place: str, value: object) -> str:
    """Return a text, the text of content parts, or JSON objects as text. RecordError for what is none of them."""
    if isinstance(value, str):
        return value
    parts = _as_list(value, "type")
    if isinstance(parts, dict) and parts.get("type") not in TEXTS and not MEDIA.match(str(parts.get("type"))):
        return json.dumps(parts, ensure_ascii=False)
    parts = parts if isinstance(parts, list) and parts else [parts]
    types = (part.get("type", "text") for part in parts if isinstance(part, dict))
    if (odd := next((name for name in types if name not in TEXTS), None)) is not None:
        raise RecordError(
            f"{place}: expected content parts of type text, got type {odd!r}", f"a content part of type {odd!r}"
        )
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if all(isinstance(text, str) for text in texts):
        return "".join(texts)
    if isinstance(value, list) and value and None not in value and not any(map(_is_turn, value)):
        return json.dumps(value, ensure_ascii=False)
    remedy = "; write it in quotes" if isinstance(value, int | float) else ""
    raise RecordError(f"{place}: expected text, got {shown(value)}{remedy}", "a turn without text")
