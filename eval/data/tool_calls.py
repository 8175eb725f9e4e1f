"""Tool calls in the forms that chat templates expect.

Templates expect a tool call in one of three forms: {"function": {"name", "arguments"}} with the arguments as a mapping
(most) or as JSON text (DeepSeek), or {"name", "arguments"} alone. Mistral's also expect ids of nine letters or digits.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from eval.data.data_files import Message, RecordError
from heads.core.errors import shown


class CallForm(NamedTuple):
    """A form in which templates expect tool calls."""

    as_json: bool = False
    """The arguments are JSON text."""
    wrapped: bool = True
    """Name and arguments are under `function`."""
    short_ids: bool = False
    """The ids of calls have nine letters or digits."""


CALL_FORMS = (CallForm(), CallForm(as_json=True), CallForm(wrapped=False), CallForm(short_ids=True))


def with_calls(messages: Sequence[Message], form: CallForm, place: str) -> list[Message]:
    """Return a conversation with its tool calls in a form. RecordError for calls in no form."""
    call_numbers = count()
    result_numbers = count()
    formed = []
    for message in messages:
        if "tool_calls" in message:
            calls = message["tool_calls"]
            if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
                raise RecordError(
                    f"{place}: expected tool_calls to be a list of calls, got {shown(calls)}", "unreadable tool calls"
                )
            message = {**message, "tool_calls": [with_form(call, form, next(call_numbers)) for call in calls]}
        elif form.short_ids and message["role"] == "tool":
            message = {**message, "tool_call_id": _short(message.get("tool_call_id", next(result_numbers)))}
        formed.append(message)
    return formed


def with_form(call: dict[str, object], form: CallForm, number: int) -> dict[str, object]:
    """Return a tool call, number `number` of its conversation, in a form."""
    whole = {"type": "function", **call}
    function = whole.pop("function", None)
    if not isinstance(function, dict):
        function = {name: whole.pop(name) for name in ("name", "arguments") if name in whole}
    arguments = function.get("arguments")
    arguments = {} if arguments is None else arguments
    if form.as_json and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not form.as_json and isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    function = function | {"arguments": arguments}
    if form.short_ids:
        whole["id"] = _short(whole.get("id", number))
    return whole | ({"function": function} if form.wrapped else function)


def _short(number: object) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", str(number))[-9:].rjust(9, "0")
