"""Chat templates: the text that one makes of a conversation, with its arguments, its date and its calls of tools.

Templates differ in how they want the arguments of a tool call: as a mapping, or as JSON text. The first form in which
the template renders the calls of a conversation is taken.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from transformers import PreTrainedTokenizerBase

from eval.benchmark.records import Message, RecordError, apply_template
from eval.benchmark.templates import arguments_read
from heads.errors import UserError, shown
from train.strict_yaml import suggest

DATE_CODE = re.compile(r"%-?[A-Za-z]")


@dataclass(frozen=True)
class ChatTemplate:
    """The way from conversations to text and to tokens: a tokenizer with its chat template, or with one given in its
    place, and the template's arguments."""

    tokenizer: PreTrainedTokenizerBase
    text: str | None = None
    """Of the template in place of the tokenizer's own."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Such as `enable_thinking`."""
    day: date = field(default_factory=date.today)
    """The date that the template sees."""

    def source(self, tools: Any = None) -> str:
        """The template's own text, with the date in it if it asks for one."""
        return dated(str(self.tokenizer.get_chat_template(self.text, tools)), self.day)

    @property
    def has_date(self) -> bool:
        """True if what the template writes depends on the date."""
        return "strftime_now" in json.dumps([self.text or self.tokenizer.chat_template])

    def key(self) -> dict[str, Any]:
        """Plain values on which the texts depend."""
        text = self.text or self.tokenizer.chat_template
        day = str(self.day) if self.has_date else None
        return {"template": text, "arguments": dict(self.arguments), "day": day}

    def render(self, messages: Sequence[Message], *, place: str, tools: Any = None, answer_next: bool = False) -> str:
        """The text of a conversation; `answer_next`: with the opening of an answer. RecordError where that fails."""
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
        """Refuse a tokenizer without a template, and arguments that the template does not read. `name`: of the
        source."""
        if self.text is None and self.tokenizer.chat_template is None:
            raise UserError(
                f"{name}: the target's tokenizer has no chat template, which chat data needs; "
                "give the source a chat_template file, or use kind text"
            )
        known = arguments_read(self.text or self.tokenizer.chat_template, self.tokenizer)
        for argument in self.arguments:
            if known is not None and argument not in known:
                raise UserError(
                    f"data.template.{argument}: the chat template reads no such argument"
                    f"{suggest(argument, known) if known else ', and no other'}"
                )

    def prepared(self, messages: Sequence[Message], *, place: str, tools: Any = None) -> Sequence[Message]:
        """The conversation, with its calls of tools in a form that the template renders. RecordError where there is
        none, and for an answer to nothing."""
        opening = next((message["role"] for message in messages if message["role"] != "system"), None)
        if opening == "assistant":
            raise RecordError(f"{place}: begins with an answer; expected what it answers", "beginning with an answer")
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
    """A hash of all that tokens depend on, beside the text."""
    whole = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    parts = [type(tokenizer).__name__, whole, sorted(tokenizer.special_tokens_map.items()), tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def dated(text: str, day: date) -> str:
    """A template in which `strftime_now` gives a fixed day's date, whatever the clock says."""
    codes = sorted({code for code in DATE_CODE.findall(text)}, key=len, reverse=True)
    if "strftime_now" not in text or not codes:
        return text
    filled = "".join(f" | replace({code!r}, {day.strftime(code)!r})" for code in codes)
    return "{%- macro strftime_now(format) -%}{{ format" + filled + " }}{%- endmacro -%}" + text


def _with_arguments(message: Message, as_json: bool, place: str) -> Message:
    """A turn with the arguments of its calls as JSON, or as mappings."""
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
