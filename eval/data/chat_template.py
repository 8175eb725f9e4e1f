"""Chat templates: rendering, what a template makes of a conversation, and its arguments, such as `enable_thinking`."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, TemplateSyntaxError, meta

from eval.data.data_files import Message, RecordError
from heads.core.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Tags that some templates have around the model's output, and that Jinja does not know. Labels do not use them,
because they often include the beginning of an answer that is already part of the prompt."""
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"})
"""Names that a template reads but that are not arguments of a user."""
ASKED, ANSWERED, THOUGHT, NEXT = (f"{word}-{word}" for word in ("asked", "answered", "thought", "next"))
"""Contents of the conversations by which a template is examined."""
MIN_OPENING = 4
"""Characters from which the opening of an answer tells rendered text from other text, if no token of it does."""
REASONING_END = "</think>"
TAIL = 16
"""Characters of an earlier answer that a text must have; templates drop what stands before, such as its reasoning."""


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
            return str(tokenizer.apply_chat_template(_with_parts(messages, parts), **options))
        return ""

    question, answer = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}
    probes = {"user": [question], "system": [{"role": "system", "content": NEXT}, question]}
    probes |= {"assistant": [question, answer], "tool": [question, answer, {"role": "tool", "content": NEXT}]}
    for role, messages in probes.items():
        (text,) = (message["content"] for message in messages if message["role"] == role)
        if text not in rendered(*messages):
            parts.add(role)
            in_parts = rendered(*messages)
            is_read = text in in_parts and "'text'" not in in_parts  # and not the list as Python prints it
            if not is_read and not (role == "tool" and "user" in parts):
                parts.remove(role)

    plain, prompt = rendered(question), rendered(question, answer_next=True)
    bos = str(tokenizer.bos_token or "")
    bos = bos if plain.startswith(bos) else ""
    head, _, rest = prompt.partition(ASKED)
    answers = [rendered(question, answer), rendered(question, answer, {"role": "user", "content": NEXT})]
    between = [text.partition(ASKED)[2].partition(ANSWERED)[0] for text in answers if ANSWERED in text]
    opening = rest[: min([len(rest), *(common_prefix(rest, text) for text in between)])]
    opening = opening.removeprefix(plain.partition(ASKED)[2]) or opening
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    if not any(token in opening for token in added) and len(opening.strip()) < MIN_OPENING:
        opening = ""
    heads = [head, rendered(*probes["system"]).partition(NEXT)[0]]
    starts = (*added, *(text.removeprefix(bos) for text in heads))
    after = answers[1].partition(ANSWERED)[2].partition(NEXT)[0]
    ending = after[: common_prefix(answers[0].partition(ANSWERED)[2], after)]
    starts = tuple(start for start in starts if start.strip())
    return Traits(frozenset(parts), opening, ending, after.removeprefix(ending), starts, bos)


def _with_parts(messages: Iterable[Message], roles: Collection[str]) -> list[Message]:
    """Return messages with the content of some roles as a list of parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if message["role"] in roles else message
        for message in messages
    ]


def apply_template(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    place: str = "conversation",
    *,
    tools: Any = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
    **arguments: Any,
) -> str:
    """Return a conversation rendered with the chat template. A prompt that the template has rendered already is
    returned as it is. RecordError if the template fails, or if such a prompt stands among other turns."""
    try:
        template = tokenizer.get_chat_template(chat_template, tools)
        traits = traits_of(tokenizer, template)
        if any(message["role"] == "user" and traits.has_rendered(message["content"]) for message in messages[:2]):
            if len(messages) == 1 and add_generation_prompt:
                return traits.with_bos(messages[0]["content"])
            raise RecordError(
                f"{place}: turn 1 or 2 has been rendered by the chat template already; give the turns apart, or the "
                "whole text as a record with 'text' to kind text",
                "with a turn that the chat template has rendered already",
            )
        return str(
            tokenizer.apply_chat_template(
                _with_parts(messages, traits.roles_of_parts),
                tokenize=False,
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **arguments,
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


def without_second_bos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a text that may begin with BOS, before which the tokenizer has put its own."""
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def split_arguments(
    arguments: Mapping[str, Any], template: str | Mapping[str, str], tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], list[str]]:
    """Return those arguments of a record that a template reads, and the names of the other ones."""
    known = arguments_read(template, tokenizer) if arguments else []
    read = {name: value for name, value in arguments.items() if known is None or name in known}
    return read, sorted(arguments.keys() - read)


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
