"""What is wrong with a rendered text or its tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from eval.data.answer_frame import REASONING_END
from eval.data.data_files import Message, RecordError
from heads.core.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEFT_OUT = "with a turn that the chat template leaves out"
"""Reason of a record with such a turn."""
TAIL = 16
"""Characters of an earlier answer that a text must have; templates drop what stands before, such as its reasoning."""


def check_rendered(
    messages: Iterable[tuple[int, Message]], text: str, place: str, name: str, answer: int | None = None
) -> None:
    """Raise RecordError if a rendered text lacks the text of one of the numbered turns. Spaces, escapes of JSON and the
    reasoning may differ. Of turns of the assistant other than number `answer` only the end is looked for, and nothing
    where they call a tool: servers leave out, too, what the template leaves out there. `name`: that of the template."""
    for number, message in messages:
        if "tool_calls" in message and number != answer:
            continue
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
                LEFT_OUT,
            )


def _letters(text: str) -> str:
    return "".join(re.findall(r"\w+", text))


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
