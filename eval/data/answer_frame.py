"""The text that a chat template puts around an answer and its reasoning, found by rendering small conversations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from eval.data.conversation_forms import REASONING
from eval.data.data_files import Message
from eval.data.template_traits import ANSWER, ANSWERED, NEXT, PARTIAL, QUESTION, THOUGHT, blank, common_prefix

if TYPE_CHECKING:
    from eval.data.chat_template import ChatTemplate

CALLED: dict[str, Any] = {"id": "call00001", "type": "function", "function": {"name": "called", "arguments": {}}}
REASONING_END = "</think>"
WORDS = "(?:think|thinking|thoughts?|reason|reasoning|seed:think|analysis|scratchpad|reflection)"
OPENS = re.compile(rf"<({WORDS})>\s*$")
CLOSES = re.compile(rf"</{WORDS}>\s*$")
EMPTY = re.compile(rf"(\s*<({WORDS})>\s*)(</\2>\s*)$")
"""Match the end of a text that opens a reasoning, that has closed one, and that does both."""
THOUGHTS = re.compile(rf"\s*(?:<({WORDS})>(.*?)</\1>|((?:(?!<think>).)*?){REASONING_END})(.*)", re.DOTALL)
"""Matches a text that begins with its reasoning, of which the prompt may have opened the tag."""
TUNES = re.compile("think|reason|effort")
"""Matches names of arguments that are about reasoning."""
LOW = "low"
"""A value of such an argument where it is neither true nor false, as gpt-oss's `reasoning_effort`."""


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
    trail: str = ""
    """Text that it writes after an answer, before the token that ends it."""
    before: str = ""
    """Text that the target writes after the prompt and before its reasoning."""
    after: str = ""
    """Text that it writes between its reasoning and its answer; empty if no form of a reasoning is known."""
    is_closed: bool = False
    """The prompt has an empty reasoning, and so asks for none."""
    following: Mapping[str, str] = {}
    """If no token ends an answer: by the role of the next turn, its beginning up to the token that the target writes
    to stop, such as GLM-4.5's `<|user|>` and `<|observation|>`."""


def frame_of(template: ChatTemplate) -> Frame:
    """Return the frame of an answer, found by rendering one with and without reasoning."""
    prompt = template.probe(QUESTION, answer_next=True)
    plain = template.probe(QUESTION, ANSWER)
    start = plain.find(ANSWERED)
    begin = shared_start(prompt, plain)
    if start < 0 or begin < common_prefix(prompt, template.probe(QUESTION)):
        return Frame()  # it rewrites prompts; conversations that it spoils are refused one by one
    opened = prompt[begin:]
    between = plain[begin:start]
    before, after, is_closed = _form_of_reasoning(template, prompt, between)
    if not (after or is_closed) and (name := template.thinking_argument):
        asking = replace(template, arguments={**template.arguments, name: True})
        other = asking.probe(QUESTION, answer_next=True)
        is_closed = other != prompt and (asking.frame.after != "" or (opened != "" and not other.endswith(opened)))
    # What stands before the answer may also be the target's own, such as gpt-oss's name of a channel, or Cohere2MoE's
    # token before a text, which stands behind a reasoning, too.
    is_own = after.endswith(between) and blank(after) != blank(between)
    is_empty = not (is_closed or is_own) if opened else after != "" and blank(between) == blank(before + after)
    rest = plain[start + len(ANSWERED) :]
    following: dict[str, str] = {}
    last = template.ends.search(rest)
    if last is None:
        for role in ("user", "tool"):
            next_turn = template.probe(QUESTION, ANSWER, {"role": role, "content": NEXT}).partition(ANSWERED)[2]
            end = template.ends.search(next_turn.partition(NEXT)[0])
            if end is not None and next_turn.startswith(rest):
                following[role] = next_turn[len(rest) : end.end()]
    trail = "" if last is None else rest[: last.start()]
    found = Frame(opened, trail=trail, before=before, after=after, is_closed=is_closed, following=following)
    return found._replace(empty=between) if is_empty else found._replace(lead=between)


def _form_of_reasoning(template: ChatTemplate, prompt: str, between: str) -> tuple[str, str, bool]:
    """Return `before`, `after` and `is_closed` of the frame. A template that drops the reasoning of a final answer
    may render it in a turn that calls a tool. `between`: what stands between the prompt and an answer."""
    for calls, text in template.thinking_texts:
        begin = shared_start(prompt, text)
        before, _, rest = text[begin:].partition(THOUGHT)
        after = rest.partition(ANSWERED)[0]
        if calls and CALLED["function"]["name"] in after:  # Gemma 4 renders calls before the text
            plain = template.probe(QUESTION, {**ANSWER, **calls})
            after = rest.removesuffix(plain[shared_start(prompt, plain) :])
        rest = blank(prompt[begin:])
        is_closed = rest.endswith(blank(after)) or blank(after).startswith(rest)
        return before, after, rest != "" and blank(after) != "" and is_closed
    if opening := OPENS.search(prompt):
        closing = f"</{opening[1]}>"
        return "", between if between.strip() == closing else f"\n{closing}\n\n", False
    if both := EMPTY.match(between):
        return both[1], both[3], False
    return "", "", CLOSES.search(prompt) is not None


def thinking_texts(template: ChatTemplate) -> list[tuple[dict[str, object], str]]:
    """Return the texts of answers with reasoning that render it, each after the calls of the answer."""
    forms: list[dict[str, object]] = [{}, {"tool_calls": [CALLED]}]
    texts = [template.probe(QUESTION, {**ANSWER, REASONING[0]: THOUGHT, **calls}) for calls in forms]
    return [(calls, text) for calls, text in zip(forms, texts, strict=True) if THOUGHT in text]


def default_of(template: ChatTemplate, name: str, *conversations: Sequence[Message]) -> bool | str | None:
    """Return the value that stands for the default of an argument that changes the prompts of conversations: True
    or False, or an empty text for an argument about reasoning that is neither; None if it changes nothing."""
    others = {other: value for other, value in template.arguments.items() if other != name}

    def prompts(**given: object) -> list[str]:
        own = replace(template, arguments={**others, **given})
        return [own.probe(*messages, answer_next=True) for messages in conversations]

    usual = prompts()
    on, off, low = (prompts(**{name: value}) for value in (True, False, LOW))
    if all(on + off) and (low in (on, off) or not any(low)):
        return usual == on if on != off and usual in (on, off) else None
    return "" if TUNES.search(name) and all(low) and low != usual else None


def shared_start(prompt: str, text: str) -> int:
    """Return the number of characters with which both begin, without a tag or token that is cut."""
    return len(PARTIAL.sub("", prompt[: common_prefix(prompt, text)]))
