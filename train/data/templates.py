"""Chat templates: rendering of conversations as text, with the template's arguments, the date and tool calls.

Templates expect a tool call in one of three forms: {"function": {"name", "arguments"}} with the arguments as a mapping
(most) or as JSON text (DeepSeek), or {"name", "arguments"} alone. Mistral's also expect ids of nine letters or digits.
The first form in which the template renders all calls of a conversation by their names is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from eval.data.chat_template import (
    ANSWERED,
    ASKED,
    NEXT,
    THOUGHT,
    Traits,
    apply_template,
    arguments_read,
    common_prefix,
    split_arguments,
    traits_of,
)
from eval.data.data_files import Message, RecordError
from eval.data.prompts import unknown_token
from heads.core.errors import UserError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DATE_CODE = re.compile(r"%-?[A-Za-z]")


class Frame(NamedTuple):
    """The text that a template puts around an answer, as it renders one."""

    opened: str = ""
    """End of the prompt that stands only in prompts, such as DeepSeek-R1's `<think>`: it opens the reasoning."""
    empty: str = ""
    """Text in place of the reasoning of an answer that has none, such as Qwen3's `<think>` and `</think>`, after the
    prompt without `opened`."""
    following: Mapping[str, str] = {}
    """If no token ends an answer: by the role of the next turn, its beginning up to the token that the target writes
    to stop, such as GLM-4.5's `<|user|>` and `<|observation|>`."""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with its own chat template or a replacement for it, and the template's arguments."""

    tokenizer: PreTrainedTokenizerBase
    text: str | None = None
    """Text of a template that replaces the tokenizer's own."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template, such as `enable_thinking`."""
    day: date = field(default_factory=date.today)
    """The date that `strftime_now` gives in the template."""
    end_ids: Collection[int] = ()
    """Tokens that end an answer, in addition to the tokenizer's."""
    file: str | None = None
    """The file of `text`."""
    vocab_size: int | None = None
    """Number of tokens of the target; None: unknown. A tokenizer may have more, which texts then must not have."""

    @property
    def template(self) -> Any:
        """The template, or several by name, or None."""
        return self.text or self.tokenizer.chat_template

    def dated_template(self, tools: Any = None) -> str:
        """Return the template with `strftime_now` as a macro that gives the date of `day`."""
        text = str(self.tokenizer.get_chat_template(self.text, tools))
        codes = sorted(set(DATE_CODE.findall(text)), key=len, reverse=True) if "strftime_now" in text else []
        if not codes:
            return text
        filled = "".join(f" | replace({code!r}, {self.day.strftime(code)!r})" for code in codes)
        return "{%- macro strftime_now(format) -%}{{ format" + filled + " }}{%- endmacro -%}" + text

    @property
    def called(self) -> str:
        return f"the chat template {self.file or f'of {self.tokenizer.name_or_path}'}"

    @property
    def traits(self) -> Traits:
        return traits_of(self.tokenizer, self.dated_template())

    def has_rendered(self, text: str) -> bool:
        return bool(self.template) and self.traits.has_rendered(text)

    @property
    def all_end_ids(self) -> set[int]:
        return {*self.end_ids, self.tokenizer.eos_token_id} - {None}

    @cached_property
    def ends(self) -> re.Pattern[str]:
        """Pattern of the texts of the tokens that end an answer."""
        added = self.tokenizer.added_tokens_decoder
        texts = sorted((added[token].content for token in self.all_end_ids & added.keys()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")  # (?!) matches nothing

    @property
    def has_date(self) -> bool:
        return "strftime_now" in json.dumps(self.template)

    def key(self) -> dict[str, Any]:
        """Return the plain values on which the rendered texts depend."""
        day = str(self.day) if self.has_date else None
        ends = sorted(self.all_end_ids)
        return {"template": self.template, "arguments": dict(self.arguments), "day": day, "ends": ends}

    def render(self, messages: Sequence[Message], *, place: str, tools: Any = None, answer_next: bool = False) -> str:
        """Return the text of a conversation. `answer_next`: add the opening of an answer. RecordError if it fails."""
        if not messages and not answer_next:
            return ""
        return apply_template(
            messages,
            self.tokenizer,
            place,
            tools=tools,
            chat_template=self.dated_template(tools),
            add_generation_prompt=answer_next,
            **self.arguments,
        )

    @cached_property
    def num_tokens(self) -> int:
        """Number of the target's tokens, or of the tokenizer's where that is unknown."""
        return self.vocab_size or 1 + max(self.tokenizer.get_vocab().values())

    @cached_property
    def limit(self) -> int | None:
        """Number of the target's tokens if the tokenizer has ids beyond them, else None."""
        highest = max(self.tokenizer.get_vocab().values())
        return self.num_tokens if highest >= self.num_tokens else None

    def check_ids(self, ids: Collection[int], place: str) -> None:
        """Raise RecordError for a text with a token that the target does not have."""
        if self.limit is not None and (fault := unknown_token(ids, self.tokenizer, self.limit)):
            raise RecordError(f"{place}: {fault}", "with a token that the target has no row for")

    def check(self, name: str) -> None:
        """Raise UserError for a tokenizer without a template. `name`: the name of the source."""
        if self.template is None:
            raise UserError(
                f"{name}: the target's tokenizer has no chat template, which chat data needs; "
                "give the source a chat_template file, or use kind text"
            )

    def arguments_read(self) -> list[str] | None:
        return arguments_read(self.template, self.tokenizer)

    @cached_property
    def _variants(self) -> dict[str, tuple[ChatTemplate, list[str]]]:
        return {}

    def with_arguments(self, arguments: Mapping[str, Any]) -> tuple[ChatTemplate, list[str]]:
        """Return the template with the arguments of a record, which take precedence, and the names of those that it
        does not read."""
        key = json.dumps(arguments, sort_keys=True, default=str)
        if key not in self._variants:
            read, unread = split_arguments(arguments, self.template, self.tokenizer)
            own = replace(self, arguments={**self.arguments, **read}) if read else self
            self._variants[key] = own, unread
        return self._variants[key]

    @cached_property
    def frame(self) -> Frame:
        """The frame of an answer, found by rendering one with and without reasoning."""
        question, answer = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}

        def rendered(*messages: Message, answer_next: bool = False) -> str:
            with suppress(RecordError):
                return self.render(messages, place="", answer_next=answer_next)
            return ""

        prompt, plain = rendered(question, answer_next=True), rendered(question, answer)
        start, before = plain.find(ANSWERED), common_prefix(prompt, plain)
        if start < 0 or before < common_prefix(prompt, rendered(question)):
            return Frame()  # it rewrites prompts; conversations that it spoils are refused one by one
        opened, empty = prompt[before:], plain[before:start]
        if not opened:
            # What stands before the answer may also be the target's own, such as gpt-oss's name of a channel.
            thinking = rendered(question, answer | {"reasoning_content": THOUGHT})[before:].partition(ANSWERED)[0]
            if THOUGHT not in thinking or blank(thinking.replace(THOUGHT, "")) != blank(empty):
                empty = ""
        rest, following = plain[start + len(ANSWERED) :], {}
        if not self.ends.search(rest):
            for role in ("user", "tool"):
                after = rendered(question, answer, {"role": role, "content": NEXT}).partition(ANSWERED)[2]
                end = self.ends.search(after.partition(NEXT)[0])
                if end is not None and after.startswith(rest):
                    following[role] = after[len(rest) : end.end()]
        return Frame(opened, empty, following)

    @cached_property
    def prompt_end(self) -> str:
        """What a prompt adds to the opening of an answer, such as DeepSeek-R1's `<think>`."""
        prompt = self.render([{"role": "user", "content": ASKED}], place=self.called, answer_next=True)
        return prompt.partition(ASKED)[2].partition(self.traits.opening)[2]

    @cached_property
    def unreasoned(self) -> str:
        """The note on an answer without reasoning where the target would think."""
        remedy = "; data.template.enable_thinking: false asks for such answers"
        read = "enable_thinking" in (self.arguments_read() or ())
        return f"answers have no reasoning, under a chat template that thinks{remedy if read else ''}"

    def prepared(self, messages: Sequence[Message], *, place: str, tools: Any = None) -> Sequence[Message]:
        """Return the conversation, with its tool calls in a form that the template renders. RecordError if there is no
        such form."""
        if not any("tool_calls" in message for message in messages):
            return messages
        faults: list[RecordError] = []
        silent = ""
        plain = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        with suppress(RecordError):
            silent = self.render(plain, place=place, tools=tools)
        for form in CALL_FORMS:
            formed = with_calls(messages, form, place)
            calls = (call for message in formed for call in message.get("tool_calls", ()))
            names = Counter(str(call.get("function", call).get("name")) for call in calls)
            try:
                text = self.render(formed, place=place, tools=tools)
            except RecordError as error:
                faults.append(error)
            else:
                if all(text.count(name) >= silent.count(name) + count for name, count in names.items()):
                    return formed
        if faults:
            raise faults[0]
        raise RecordError(f"{place}: the chat template renders no tool calls; leave it out", "tool calls not rendered")


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    whole = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    parts = [type(tokenizer).__name__, whole, sorted(tokenizer.special_tokens_map.items()), tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


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
    call_numbers, result_numbers, formed = count(), count(), []
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


def with_form(call: dict[str, Any], form: CallForm, number: int) -> dict[str, Any]:
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


def _short(number: Any) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", str(number))[-9:].rjust(9, "0")


def blank(text: str) -> str:
    return "".join(text.split())
