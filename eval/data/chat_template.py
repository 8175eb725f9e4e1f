"""Chat templates: the one place where a conversation becomes the text of a prompt or of a document.

Training, regenerated answers, the bench, the chat and requests to servers render with a `ChatTemplate`, so that they
give a model the same text. What a template makes of a conversation, such as the reasoning before an answer, is not
known by its name: it is read off what it renders for small conversations.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, TemplateSyntaxError, meta

from eval.data.conversation_forms import REASONING
from eval.data.data_files import Message, RecordError
from eval.data.tool_calls import CALL_FORMS, with_calls
from heads.core.errors import UserError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Tags that some templates have around the model's output, and that Jinja does not know. Labels do not use them,
because they often include the beginning of an answer that is already part of the prompt."""
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"})
"""Names that a template reads but that are not arguments of a user."""
ASKED, ANSWERED, THOUGHT, NEXT = (f"{word}-{word}" for word in ("asked", "answered", "thought", "next"))
"""Contents of the conversations by which a template is examined."""
QUESTION: Message = {"role": "user", "content": ASKED}
ANSWER: Message = {"role": "assistant", "content": ANSWERED}
CALLED: dict[str, Any] = {"id": "call00001", "type": "function", "function": {"name": "called", "arguments": {}}}
MIN_OPENING = 4
"""Characters from which the opening of an answer tells rendered text from other text, if no token of it does."""
REASONING_END = "</think>"
TAIL = 16
"""Characters of an earlier answer that a text must have; templates drop what stands before, such as its reasoning."""
DATE_CODE = re.compile(r"%-?[A-Za-z]")
WORDS = "(?:think|thinking|thoughts?|reason|reasoning|seed:think|analysis|scratchpad|reflection)"
OPENS = re.compile(rf"<({WORDS})>\s*$")
CLOSES = re.compile(rf"</{WORDS}>\s*$")
EMPTY = re.compile(rf"(\s*<({WORDS})>\s*)(</\2>\s*)$")
"""Match the end of a text that opens a reasoning, that has closed one, and that does both."""
THOUGHTS = re.compile(rf"\s*(?:<({WORDS})>(.*?)</\1>|((?:(?!<think>).)*?){REASONING_END})(.*)", re.DOTALL)
"""Matches a text that begins with its reasoning, of which the prompt may have opened the tag."""
PARTIAL = re.compile(r"<[^<>]*$")
"""Matches a tag or token that is cut."""
TUNES = re.compile("think|reason|effort")
"""Matches names of arguments that are about reasoning."""
LOW = "low"
"""A value of such an argument where it is neither true nor false, as gpt-oss's `reasoning_effort`."""


class Traits(NamedTuple):
    """What a template makes of conversations, read off what it renders."""

    roles_of_parts: frozenset[str]
    """Roles whose content it reads as a list of parts, as templates of vision-language models do."""
    opening: str
    """Text with which every answer begins in a conversation, such as `<|im_start|>assistant`; empty if there is none
    by which to know rendered text."""
    ending: str
    """Text that ends every answer."""
    next: str
    """Text between it and the next question."""
    starts: tuple[str, ...]
    """Texts of which rendered text begins with one."""
    bos: str
    """The token with which it begins every text; empty if there is none."""
    thinks_in_parts: bool
    """It reads the reasoning of an answer as a part of its content, as Ministral's does."""

    def has_rendered(self, text: str) -> bool:
        """Return True for a text that begins as rendered text and has the opening of an answer in it."""
        return self.opening != "" and text.lstrip().startswith(self.starts) and self.opening in text[1:]

    def with_bos(self, text: str) -> str:
        return text if text.startswith(self.bos) else self.bos + text


@lru_cache(maxsize=32)
def traits_of(tokenizer: PreTrainedTokenizerBase, template: str) -> Traits:
    parts: set[str] = set()

    def rendered(*messages: Message, answer_next: bool = False) -> str:
        options: dict[str, Any] = {"chat_template": template, "add_generation_prompt": answer_next, "tokenize": False}
        with suppress(Exception):  # a template is a program, and may raise anything
            return str(tokenizer.apply_chat_template(_as_given(messages, parts), **options))
        return ""

    probes = {"user": [QUESTION], "system": [{"role": "system", "content": NEXT}, QUESTION]}
    probes |= {"assistant": [QUESTION, ANSWER], "tool": [QUESTION, ANSWER, {"role": "tool", "content": NEXT}]}
    for role, messages in probes.items():
        (text,) = (message["content"] for message in messages if message["role"] == role)
        if text not in rendered(*messages):
            parts.add(role)
            in_parts = rendered(*messages)
            is_read = text in in_parts and "'text'" not in in_parts  # and not the list as Python prints it
            if not is_read and not (role == "tool" and "user" in parts):
                parts.remove(role)

    plain, prompt = rendered(QUESTION), rendered(QUESTION, answer_next=True)
    bos = str(tokenizer.bos_token or "")
    bos = bos if plain.startswith(bos) else ""
    head, _, rest = prompt.partition(ASKED)
    answers = [rendered(QUESTION, ANSWER), rendered(QUESTION, ANSWER, {"role": "user", "content": NEXT})]
    between = [text.partition(ASKED)[2].partition(ANSWERED)[0] for text in answers if ANSWERED in text]
    opening = rest[: min([len(rest), *(common_prefix(rest, text) for text in between)])]
    opening = PARTIAL.sub("", opening.removeprefix(plain.partition(ASKED)[2]) or opening)
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    if not any(token in opening for token in added) and len(opening.strip()) < MIN_OPENING:
        opening = ""
    heads = [head, rendered(*probes["system"]).partition(NEXT)[0]]
    starts = (*added, *(text.removeprefix(bos) for text in heads))
    after = answers[1].partition(ANSWERED)[2].partition(NEXT)[0]
    ending = after[: common_prefix(answers[0].partition(ANSWERED)[2], after)]
    starts = tuple(start for start in starts if start.strip())
    thought = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWERED}]
    with_parts = rendered(QUESTION, {**ANSWER, "content": thought})
    is_read = THOUGHT in with_parts and "'thinking'" not in with_parts  # and not the list as Python prints it
    thinks_in_parts = is_read and THOUGHT not in rendered(QUESTION, {**ANSWER, REASONING[0]: THOUGHT})
    return Traits(frozenset(parts), opening, ending, after.removeprefix(ending), starts, bos, thinks_in_parts)


def _as_given(messages: Iterable[Message], roles: Collection[str], thinks_in_parts: bool = False) -> list[Message]:
    """Return messages as templates are given them: the content of some roles as a list of parts, and an answer's
    reasoning under every name that templates read, or as a part."""
    given = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING if message.get(key)), None)
        named = {} if reasoning is None else dict.fromkeys(REASONING, reasoning)
        content: Any = message["content"]
        if isinstance(content, str) and (message["role"] in roles or (thinks_in_parts and named)):
            content = [{"type": "text", "text": content}]
            content = [{"type": "thinking", "thinking": reasoning}, *content] if thinks_in_parts and named else content
        given.append({**named, **message, "content": content})
    return given


class Frame(NamedTuple):
    """The text that a template puts around an answer, as it renders one."""

    opened: str = ""
    """End of the prompt that stands only in prompts, such as DeepSeek-R1's `<think>`, which opens the reasoning, or
    Gemma 4's empty channel, which asks for none."""
    empty: str = ""
    """Text in place of the reasoning of an answer that has none, such as Qwen3's `<think>` and `</think>`, after the
    prompt without `opened`."""
    lead: str = ""
    """Text that the target writes before an answer without reasoning, such as gpt-oss's name of a channel."""
    before: str = ""
    """Text that the target writes after the prompt and before its reasoning."""
    after: str = ""
    """Text that it writes between its reasoning and its answer; empty if no form of a reasoning is known."""
    is_closed: bool = False
    """The prompt has an empty reasoning, and so asks for none."""
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
                    _as_given(messages, traits.roles_of_parts, traits.thinks_in_parts),
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
        self, messages: Sequence[Message], *, place: str, tools: Any = None, num_checked: int = 0
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
        text = str(self.tokenizer.decode(list(written), clean_up_tokenization_spaces=False))
        opening, closing = frame.before.strip(), frame.after.strip()
        opened = "" if frame.is_closed else self.prompt_end.strip()
        is_opened = OPENS.search(prompt) is not None or (opened != "" and prompt.rstrip().endswith(opened))
        if closing and (text.lstrip().startswith(opening) if opening else is_opened):
            reasoning, _, content = text.lstrip().removeprefix(opening).partition(closing)
        elif found := THOUGHTS.match(text):
            reasoning, content = found[2] or found[3] or "", found[4]
        else:
            return {"role": "assistant", "content": text.removeprefix(frame.lead)}
        if self._thinking:  # it brings its own white space; another is given all that follows the tag
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

    def _probe(self, *messages: Message, answer_next: bool = False, tools: Any = None) -> str:
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

    def with_arguments(self, arguments: Mapping[str, Any]) -> tuple[ChatTemplate, list[str]]:
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
        """The frame of an answer, found by rendering one with and without reasoning."""
        prompt = self._probe(QUESTION, answer_next=True)
        plain = self._probe(QUESTION, ANSWER)
        start, begin = plain.find(ANSWERED), _shared(prompt, plain)
        if start < 0 or begin < common_prefix(prompt, self._probe(QUESTION)):
            return Frame()  # it rewrites prompts; conversations that it spoils are refused one by one
        opened, between = prompt[begin:], plain[begin:start]
        before, after, is_closed = self._form_of_reasoning(prompt, between)
        if not (after or is_closed) and (name := self.thinking_argument):
            asking = replace(self, arguments={**self.arguments, name: True})
            other = asking._probe(QUESTION, answer_next=True)
            is_closed = other != prompt and (asking.frame.after != "" or (opened != "" and not other.endswith(opened)))
        # What stands before the answer may also be the target's own, such as gpt-oss's name of a channel.
        is_empty = not is_closed if opened else after != "" and blank(between) == blank(before + after)
        rest = plain[start + len(ANSWERED) :]
        following: dict[str, str] = {}
        if not self.ends.search(rest):
            for role in ("user", "tool"):
                next_turn = self._probe(QUESTION, ANSWER, {"role": role, "content": NEXT}).partition(ANSWERED)[2]
                end = self.ends.search(next_turn.partition(NEXT)[0])
                if end is not None and next_turn.startswith(rest):
                    following[role] = next_turn[len(rest) : end.end()]
        empty, lead = (between, "") if is_empty else ("", between)
        return Frame(opened, empty, lead, before, after, is_closed, following)

    def _form_of_reasoning(self, prompt: str, between: str) -> tuple[str, str, bool]:
        """Return `before`, `after` and `is_closed` of the frame. A template that drops the reasoning of a final answer
        may render it in a turn that calls a tool. `between`: what stands between the prompt and an answer."""
        for calls, text in self._thinking:
            begin = _shared(prompt, text)
            before, _, rest = text[begin:].partition(THOUGHT)
            after = rest.partition(ANSWERED)[0]
            if calls and CALLED["function"]["name"] in after:  # Gemma 4 renders calls before the text
                plain = self._probe(QUESTION, {**ANSWER, **calls})
                after = rest.removesuffix(plain[_shared(prompt, plain) :])
            return before, after, blank(after) != "" and blank(prompt[begin:]).endswith(blank(after))
        if opening := OPENS.search(prompt):
            closing = f"</{opening[1]}>"
            return "", between if between.strip() == closing else f"\n{closing}\n\n", False
        if both := EMPTY.match(between):
            return both[1], both[3], False
        return "", "", CLOSES.search(prompt) is not None

    @cached_property
    def _thinking(self) -> list[tuple[dict[str, Any], str]]:
        """The texts of answers with reasoning that have it, each after the calls of the answer."""
        forms: list[dict[str, Any]] = [{}, {"tool_calls": [CALLED]}]
        texts = [self._probe(QUESTION, {**ANSWER, REASONING[0]: THOUGHT, **calls}) for calls in forms]
        return [(calls, text) for calls, text in zip(forms, texts, strict=True) if THOUGHT in text]

    @cached_property
    def prompt_end(self) -> str:
        """What a prompt adds to the opening of an answer, such as DeepSeek-R1's `<think>`."""
        opening = self.traits.opening
        prompt = self._probe(QUESTION, answer_next=True)
        return prompt.partition(ASKED)[2].partition(opening)[2] if opening else ""

    def _default(self, name: str, *conversations: Sequence[Message]) -> bool | str | None:
        """Return the value that stands for the default of an argument that changes the prompts of conversations: True
        or False, or an empty text for an argument about reasoning that is neither; None if it changes nothing."""
        others = {other: value for other, value in self.arguments.items() if other != name}

        def prompts(**given: Any) -> list[str]:
            own = replace(self, arguments={**others, **given})
            return [own._probe(*messages, answer_next=True) for messages in conversations]

        usual = prompts()
        on, off, low = (prompts(**{name: value}) for value in (True, False, LOW))
        if all(on + off) and (low in (on, off) or not any(low)):
            return usual == on if on != off and usual in (on, off) else None
        return "" if TUNES.search(name) and all(low) and low != usual else None

    @cached_property
    def left_at_default(self) -> tuple[str, str]:
        """What to say of arguments that change prompts and are not given, and how another value is given; both are
        empty if there are none."""
        later = (QUESTION, {**ANSWER, REASONING[0]: THOUGHT}, {"role": "user", "content": NEXT})
        unset = [name for name in self.arguments_read() or () if name not in self.arguments]
        found = [(name, self._default(name, [QUESTION], later)) for name in unset]
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
        return next((name for name in names if isinstance(self._default(name, [QUESTION]), bool)), "")

    @cached_property
    def reads_tools(self) -> bool:
        parameters = {"type": "object", "properties": {}}
        tool = {"name": CALLED["function"]["name"], "description": NEXT, "parameters": parameters}
        return tool["name"] in self._probe(QUESTION, answer_next=True, tools=[{"type": "function", "function": tool}])

    @cached_property
    def unreasoned(self) -> str:
        """The note on an answer without reasoning where the target would think."""
        name = self.thinking_argument
        remedy = f"; data.template.{name}: false asks for such answers" if name else ""
        return f"answers have no reasoning, under a chat template that thinks{remedy}"

    def prepared(self, messages: Sequence[Message], *, place: str, tools: Any = None) -> Sequence[Message]:
        """Return the conversation in the form that the template renders: the reasoning of answers in its own field,
        and tool calls. RecordError if there is no such form."""
        messages = [self._with_reasoning(message) for message in messages]
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


def check_rendered(
    messages: Iterable[tuple[int, Message]], text: str, place: str, name: str, answer: int | None = None
) -> None:
    """Raise RecordError if a rendered text lacks the text of one of the numbered turns. Spaces, escapes of JSON and the
    reasoning may differ, and of turns of the assistant other than number `answer` only the end is looked for. `name`:
    that of the template."""
    for number, message in messages:
        content = message["content"].rpartition(REASONING_END)[2].strip()
        if message["role"] == "assistant" and number != answer:
            content = content[-TAIL:]
        escaped = (json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1])
        if any(form in text for form in (content, *escaped)):
            continue
        if not _letters(content) or _letters(content) not in _letters(text):
            raise RecordError(
                f"{place}: {name} leaves out the text of turn {number} ({message['role']}, {shown(content)}); use one "
                "that renders it, or fix the record",
                "with a turn that the chat template leaves out",
            )


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    if a == b[: len(a)]:
        return len(a)
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shared(prompt: str, text: str) -> int:
    """Return the number of characters with which both begin, without a tag or token that is cut."""
    return len(PARTIAL.sub("", prompt[: common_prefix(prompt, text)]))


def blank(text: str) -> str:
    return "".join(text.split())


def _letters(text: str) -> str:
    return "".join(re.findall(r"\w+", text))


def arguments_read(template: str | Mapping[str, str], tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    """Return the names that a template (or any template of a mapping) reads but does not set, or None if it cannot be
    parsed."""
    texts: Iterable[str] = [template] if isinstance(template, str) else template.values()
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        trees = [environment.parse(GENERATION.sub("", text)) for text in texts]
    except TemplateSyntaxError:
        return None
    known = frozenset[str]().union(*(meta.find_undeclared_variables(tree) for tree in trees))
    return sorted(known - GIVEN - tokenizer.special_tokens_map.keys())


def unknown_token(ids: Collection[int], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None) -> str:
    """Return what is wrong with a text for a target of `vocab_size` tokens (None: unknown): its highest token, if the
    target does not have it; else an empty text."""
    token = int(max(ids, default=-1))
    if tokenizer is None or vocab_size is None or token < vocab_size:
        return ""
    return f"token {tokenizer.convert_ids_to_tokens(token)!r} ({token}) is none of the target's {vocab_size} tokens"


def without_second_bos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a text that may begin with BOS, before which the tokenizer has put its own."""
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def with_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the arguments that its chat template reads set in the template, so that prompts are
    rendered like the training data. An argument that a prompt is rendered with takes precedence."""
    template = tokenizer.chat_template
    known = None if template is None else arguments_read(template, tokenizer)
    read = {name: value for name, value in arguments.items() if name in (known or ())}
    if not read:
        return tokenizer
    settings = "".join(
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {json.dumps(value)} -%}}{{%- endif -%}}"
        for name, value in read.items()
    )
    twin = copy.copy(tokenizer)
    twin.chat_template = (
        {name: settings + text for name, text in template.items()}
        if isinstance(template, dict)
        else settings + template
    )
    return twin
