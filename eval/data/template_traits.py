"""What a chat template makes of conversations, read off what it renders for small ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from eval.data.conversation_forms import REASONING
from eval.data.data_files import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASKED, ANSWERED, THOUGHT, NEXT = (f"{word}-{word}" for word in ("asked", "answered", "thought", "next"))
"""Contents of the conversations by which a template is examined."""
QUESTION: Message = {"role": "user", "content": ASKED}
ANSWER: Message = {"role": "assistant", "content": ANSWERED}
MIN_OPENING = 4
"""Characters from which the opening of an answer tells rendered text from other text, if no token of it does."""
PARTIAL = re.compile(r"<[^<>]*$")
"""Matches a tag or token that is cut."""


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
            return str(tokenizer.apply_chat_template(as_given(messages, parts), **options))
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

    plain = rendered(QUESTION)
    prompt = rendered(QUESTION, answer_next=True)
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
    is_read = THOUGHT in with_parts and not re.search("['\"]thinking", with_parts)  # and not the list, printed
    thinks_in_parts = is_read and THOUGHT not in rendered(QUESTION, {**ANSWER, REASONING[0]: THOUGHT})
    return Traits(frozenset(parts), opening, ending, after.removeprefix(ending), starts, bos, thinks_in_parts)


def as_given(messages: Iterable[Message], roles: Collection[str], thinks_in_parts: bool = False) -> list[Message]:
    """Return messages as templates are given them: the content of some roles as a list of parts, and an answer's
    reasoning under every name that templates read, or as a part."""
    given = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING if message.get(key)), None)
        named = {} if reasoning is None else dict.fromkeys(REASONING, reasoning)
        content: object = message["content"]
        if isinstance(content, str) and (message["role"] in roles or (thinks_in_parts and named)):
            content = [{"type": "text", "text": content}]
            content = [{"type": "thinking", "thinking": reasoning}, *content] if thinks_in_parts and named else content
        given.append({**named, **message, "content": content})
    return given


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    if a == b[: len(a)]:
        return len(a)
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def blank(text: str) -> str:
    return "".join(text.split())
