"""Chat templates: the one place where a conversation becomes the text of a prompt or of a document.

Training, regenerated answers, the bench, the chat and requests to servers render with a `ChatTemplate`, so that they
give a model the same text. What a template makes of a conversation, such as the reasoning before an answer, is not
known by its name: it is read off what it renders for small conversations.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from eval.data.answer_frame import (
    CALLED,
    OPENS,
    THOUGHTS,
    TUNES,
    Frame,
    default_of,
    frame_of,
    thinking_texts,
)
from eval.data.conversation_forms import REASONING
from eval.data.data_files import Message, RecordError
from eval.data.rendered_text import check_rendered, unknown_token
from eval.data.template_arguments import arguments_read
from eval.data.template_traits import ANSWER, ASKED, NEXT, QUESTION, THOUGHT, Traits, as_given, traits_of
from eval.data.tool_calls import CALL_FORMS, with_calls
from heads.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE_CODE = re.compile(r"%-?[A-Za-z]")
TWO_DAYS = date(2001, 2, 3), date(2012, 11, 26)
"""Two days that no part of a date has in common."""


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

    @cached_property
    def has_date(self) -> bool:
        """Whether the date is in what the template renders. An argument may fix it, as `date_string` of Llama 3.1."""
        if "strftime_now" not in json.dumps(self.template):
            return False
        turns = [QUESTION, ANSWER, QUESTION, ANSWER]
        chats: list[list[Message]] = [
            [*system, *turns[:count]] for system in ([], [{"role": "system", "content": NEXT}]) for count in (1, 4)
        ]  # it may stand in a system prompt of the template's own, or behind some turns
        tool = {"type": "function", "function": {"name": NEXT, "description": NEXT, "parameters": {"properties": {}}}}
        try:
            for messages, tools in product(chats, (None, [tool])):
                days = {replace(self, day=day).render(messages, place="", tools=tools) for day in TWO_DAYS}
                if len(days) > 1:
                    return True
        except RecordError:  # it may print the date where it does not fail
            return True
        return False

    def key(self) -> dict[str, object]:
        """Return the plain values on which the rendered texts depend."""
        day = str(self.day) if self.has_date else None
        ends = sorted(self.all_end_ids)
        return {"template": self.template, "arguments": dict(self.arguments), "day": day, "ends": ends}

    def render(self, messages: Sequence[Message], *, place: str, tools: Any = None, answer_next: bool = False) -> str:
        """Return the text of a conversation. `answer_next`: add the opening of an answer. A prompt that the template
        has rendered already is returned as it is. RecordError if the template fails, or if such a prompt stands among
        other turns."""
        if not messages and not answer_next:
            return ""
        try:
            template = self.dated_template(tools)
            traits = traits_of(self.tokenizer, template)
            if any(message["role"] == "user" and traits.has_rendered(message["content"]) for message in messages[:2]):
                if len(messages) == 1 and answer_next:
                    return traits.with_bos(messages[0]["content"])
                raise RecordError(
                    f"{place}: turn 1 or 2 has been rendered by the chat template already; give the turns apart, or "
                    "the whole text as a record with 'text' to kind text",
                    "with a turn that the chat template has rendered already",
                )
            return str(
                self.tokenizer.apply_chat_template(
                    as_given(messages, traits.roles_of_parts, traits.thinks_in_parts),
                    tokenize=False,
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=answer_next,
                    **self.arguments,
                )
            )
        except RecordError:
            raise
        except Exception as error:  # a template is a program, and may raise anything
            what = f"turns 1 to {len(messages)}" if messages else "an empty conversation"
            reason = str(error) or type(error).__name__
            raise RecordError(
                f"{place}: the chat template refuses {what} ({reason}); fix the record or the template",
                "refused by the chat template",
            ) from None

    def prompt(
        self, messages: Sequence[Message], *, place: str, tools: object = None, num_checked: int = 0
    ) -> tuple[str, list[int]]:
        """Return the text and the tokens after which the target writes the next answer. RecordError if the template
        leaves out a turn; the first `num_checked` are not looked for."""
        text = self.render(messages, place=place, tools=tools, answer_next=True)
        check_rendered(enumerate(messages[num_checked:], start=num_checked + 1), text, place, self.called)
        return text, list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def turn(self, prompt: str, answer: Sequence[int]) -> Message:
        """Return the tokens that the target wrote after a prompt as a turn of the assistant, as a server with a
        reasoning parser gives it: the reasoning apart, and without the token that ended the answer."""
        frame = self.frame
        written = answer[:-1] if answer and answer[-1] in self.special_ids | self.all_end_ids else answer
        text = str(self.tokenizer.decode(list(written), clean_up_tokenization_spaces=False)).removesuffix(frame.trail)
        opening = frame.before.strip()
        closing = frame.after.strip()
        opened = "" if frame.is_closed else self.prompt_end.strip()
        is_opened = OPENS.search(prompt) is not None or (opened != "" and prompt.rstrip().endswith(opened))
        if closing and (text.lstrip().startswith(opening) if opening else is_opened):
            reasoning, _, content = text.lstrip().removeprefix(opening).partition(closing)
        elif found := THOUGHTS.match(text):
            reasoning = found[2] or found[3] or ""
            content = found[4]
        else:
            return {"role": "assistant", "content": text.removeprefix(frame.lead)}
        if self.thinking_texts:  # it brings its own white space; another is given all that follows the tag
            content = content.lstrip("\n")
        return {"role": "assistant", "content": content, REASONING[0]: reasoning.strip()}

    @cached_property
    def special_ids(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return {token for token, each in added if each.special}.union(self.tokenizer.all_special_ids)

    def without_special(self, text: str) -> str:
        """Return a text without the special tokens that it spells, as engines return it."""
        added = self.tokenizer.added_tokens_decoder
        for token in self.special_ids & added.keys():
            text = text.replace(added[token].content, "")
        return text

    def probe(self, *messages: Message, answer_next: bool = False, tools: object = None) -> str:
        """Return the text of a small conversation, which is empty if the template refuses it."""
        with suppress(RecordError):
            return self.render(messages, place="", answer_next=answer_next, tools=tools)
        return ""

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

    def with_arguments(self, arguments: Mapping[str, object]) -> tuple[ChatTemplate, list[str]]:
        """Return the template with the arguments of a record, which take precedence, and the names of those that it
        does not read."""
        key = json.dumps(arguments, sort_keys=True, default=str)
        if key not in self._variants:
            known = self.arguments_read() if arguments else []
            read = {name: value for name, value in arguments.items() if known is None or name in known}
            own = replace(self, arguments={**self.arguments, **read}) if read else self
            self._variants[key] = own, sorted(arguments.keys() - read)
        return self._variants[key]

    @cached_property
    def frame(self) -> Frame:
        return frame_of(self)

    @cached_property
    def thinking_texts(self) -> list[tuple[dict[str, object], str]]:
        return thinking_texts(self)

    @cached_property
    def prompt_end(self) -> str:
        """What a prompt adds to the opening of an answer, such as DeepSeek-R1's `<think>`."""
        opening = self.traits.opening
        prompt = self.probe(QUESTION, answer_next=True)
        return prompt.partition(ASKED)[2].partition(opening)[2] if opening else ""

    @cached_property
    def left_at_default(self) -> tuple[str, str]:
        """What to say of arguments that change prompts and are not given, and how another value is given; both are
        empty if there are none."""
        later = (QUESTION, {**ANSWER, REASONING[0]: THOUGHT}, {"role": "user", "content": NEXT})
        unset = [name for name in self.arguments_read() or () if name not in self.arguments]
        found = [(name, default_of(self, name, [QUESTION], later)) for name in unset]
        named = [(name, value) for name, value in found if value is not None]
        if not named:
            return "", ""
        names = ", ".join(name if value == "" else f"{name} ({json.dumps(value)})" for name, value in named)
        name, value = named[0]
        other = "VALUE" if value == "" else json.dumps(not value)
        return f"the chat template reads {names}, left at default", f"{name}={other}"

    @cached_property
    def thinking_argument(self) -> str:
        """The argument by which prompts ask for reasoning or for none, true or false, such as `enable_thinking`; empty
        if there is none."""
        names = filter(TUNES.search, self.arguments_read() or ())
        return next((name for name in names if isinstance(default_of(self, name, [QUESTION]), bool)), "")

    @cached_property
    def reads_tools(self) -> bool:
        parameters = {"type": "object", "properties": {}}
        tool = {"name": CALLED["function"]["name"], "description": NEXT, "parameters": parameters}
        return tool["name"] in self.probe(QUESTION, answer_next=True, tools=[{"type": "function", "function": tool}])

    @cached_property
    def unreasoned(self) -> str:
        """The note on an answer without reasoning where the target would think."""
        name = self.thinking_argument
        remedy = f"; data.template.{name}: false asks for such answers" if name else ""
        return f"answers have no reasoning, under a chat template that thinks{remedy}"

    def prepared(self, messages: Sequence[Message], *, place: str, tools: object = None) -> Sequence[Message]:
        """Return the conversation in the form that the template renders: the reasoning of answers in its own field,
        and tool calls. RecordError if there is no such form."""
        messages = [self._with_reasoning(message) for message in messages]
        if not any("tool_calls" in message for message in messages):
            return messages
        faults: list[RecordError] = []
        # A call's name may stand in the text beside it, too, which not every template renders.
        bare: list[Message] = [
            {**message, "content": ""} if "tool_calls" in message else message for message in messages
        ]
        plain = [dict(message) for message in bare]
        for message in plain:
            message.pop("tool_calls", None)
        silent = self.probe(*plain, tools=tools)
        for form in CALL_FORMS:
            formed = with_calls(bare, form, place)
            calls = (call for message in formed for call in message.get("tool_calls", ()))
            names = Counter(str(call.get("function", call).get("name")) for call in calls)
            try:
                text = self.render(formed, place=place, tools=tools)
            except RecordError as error:
                faults.append(error)
                continue
            if all(text.count(name) >= silent.count(name) + count for name, count in names.items()):
                return with_calls(messages, form, place)
        if len(faults) == len(CALL_FORMS):
            raise faults[0]
        raise RecordError(f"{place}: the chat template renders no tool calls; leave it out", "tool calls not rendered")

    def _with_reasoning(self, message: Message) -> Message:
        """Return an answer with the reasoning that stands in tags in its text in a field, if there is a form of
        reasoning: else the tags are text of the answer."""
        if message["role"] != "assistant" or not (self.frame.after or self.frame.is_closed):
            return message
        found = THOUGHTS.match(message["content"])
        is_opened = not (self.frame.before.strip() or self.frame.is_closed)  # by the prompt
        if found is None or not (found[1] or is_opened) or any(message.get(key) for key in REASONING):
            return message
        reasoning = found[2] or found[3] or ""
        return {**message, "content": found[4].lstrip("\n"), REASONING[0]: reasoning.strip()}


@lru_cache(maxsize=8)
def _template_of(tokenizer: PreTrainedTokenizerBase, template: str) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def chat_template_of(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Return the chat template of a tokenizer, which must have one."""
    return _template_of(tokenizer, json.dumps(tokenizer.chat_template))
