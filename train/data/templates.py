"""Chat templates: rendering of conversations as text, with the template's arguments, the date and tool calls.

Templates expect the arguments of a tool call either as a mapping or as JSON text. The first of these forms in which the
template renders the calls of a conversation is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

from eval.measure.chat_template import arguments_read
from eval.measure.records import Message, RecordError, apply_template
from heads.core.errors import UserError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE_CODE = re.compile(r"%-?[A-Za-z]")


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with its own chat template or a replacement for it, and the template's arguments."""

    tokenizer: PreTrainedTokenizerBase
    text: str | None = None
    """Text of a template that replaces the tokenizer's own."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template, such as `enable_thinking`."""
    day: date = field(default_factory=date.today)
    """The current date for the template."""

    def source(self, tools: Any = None) -> str:
        return dated(str(self.tokenizer.get_chat_template(self.text, tools)), self.day)

    @property
    def has_date(self) -> bool:
        return "strftime_now" in json.dumps([self.text or self.tokenizer.chat_template])

    def key(self) -> dict[str, Any]:
        """Return the plain values on which the rendered texts depend."""
        text = self.text or self.tokenizer.chat_template
        day = str(self.day) if self.has_date else None
        return {"template": text, "arguments": dict(self.arguments), "day": day}

    def render(self, messages: Sequence[Message], *, place: str, tools: Any = None, answer_next: bool = False) -> str:
        """Return the text of a conversation. `answer_next`: add the opening of an answer. RecordError if it fails."""
        if not messages and not answer_next:
            return ""
        return apply_template(
            messages,
            self.tokenizer,
            place,
            tools=tools,
            chat_template=self.source(tools),
            add_generation_prompt=answer_next,
            **self.arguments,
        )

    def check(self, name: str) -> None:
        """Raise UserError for a tokenizer without a template. `name`: the name of the source."""
        if self.text is None and self.tokenizer.chat_template is None:
            raise UserError(
                f"{name}: the target's tokenizer has no chat template, which chat data needs; "
                "give the source a chat_template file, or use kind text"
            )

    def arguments_read(self) -> list[str] | None:
        return arguments_read(self.text or self.tokenizer.chat_template, self.tokenizer)

    def prepared(self, messages: Sequence[Message], *, place: str, tools: Any = None) -> Sequence[Message]:
        """Return the conversation, with its tool calls in a form that the template renders. RecordError if there is no
        such form."""
        if not any("tool_calls" in message for message in messages):
            return messages
        fault = RecordError(
            f"{place}: the chat template renders no tool calls; leave it out", "tool calls not rendered"
        )
        silent = None
        plain = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        with suppress(RecordError):
            silent = self.render(plain, place=place, tools=tools)
        for as_json in (False, True):
            form = [_with_arguments(message, as_json, place) for message in messages]
            try:
                if self.render(form, place=place, tools=tools) != silent:
                    return form
            except RecordError as error:
                fault = error
        raise fault


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    whole = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    parts = [type(tokenizer).__name__, whole, sorted(tokenizer.special_tokens_map.items()), tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def dated(text: str, day: date) -> str:
    """Return the template with `strftime_now` replaced by a macro that gives the date of a fixed day."""
    codes = sorted({code for code in DATE_CODE.findall(text)}, key=len, reverse=True)
    if "strftime_now" not in text or not codes:
        return text
    filled = "".join(f" | replace({code!r}, {day.strftime(code)!r})" for code in codes)
    return "{%- macro strftime_now(format) -%}{{ format" + filled + " }}{%- endmacro -%}" + text


def _with_arguments(message: Message, as_json: bool, place: str) -> Message:
    """Return a turn with the arguments of its tool calls as JSON text, or as mappings."""
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RecordError(
            f"{place}: expected tool_calls to be a list of calls, got {shown(calls)}", "unreadable tool calls"
        )

    def arguments(given: Any) -> Any:
        if as_json:
            return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        try:
            return json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            return given

    formed = []
    for call in calls:
        function = call["function"] if isinstance(call.get("function"), dict) else call
        function = {**function, "arguments": arguments(function.get("arguments", {}))}
        formed.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": formed}
