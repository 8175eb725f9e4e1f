"""Conversations as token ids with a label mask, by rendering the tokenizer's own chat template turn by turn.

What the template adds around an answer is never guessed. The prompt of turn i is the template over the turns before it,
with the generation prompt; the answer is what the template over the turns up to i adds to that. A template that
rewrites earlier turns (one that drops the reasoning of past answers) gives every answer a document of its own, as the
model sees it when it answers.

Templates differ in how they want the arguments of a tool call: as a mapping, or as JSON text. The first form in which
the template renders the calls of a conversation is taken.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from eval.benchmark.records import Message, RecordError, apply_template
from heads.errors import UserError, shown
from train.data.packing import Document


def encode_text(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Iterator[Document]:
    """Plain text with the special tokens the tokenizer itself adds, closed by end-of-text; every token is a label."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for start in range(0, len(texts), 256):
        for ids in tokenizer(list(texts[start : start + 256]), return_attention_mask=False, verbose=False)["input_ids"]:
            whole = np.array(ids if end and ids[-1:] == end else [*ids, *end], dtype=np.int32)
            yield Document(whole, np.ones(len(whole), dtype=np.bool_))


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    place: str = "conversation",
    template: str | None = None,
    tools: list[Any] | None = None,
) -> list[Document]:
    """Documents of a conversation whose labels are the assistant's answers; none if it holds no answer.

    One document, unless the template renders a turn differently once others follow. RecordError for a conversation that
    cannot be trained on.
    """
    options = {"place": place, "chat_template": template, "tools": tools}
    messages = _prepared(tokenizer, messages, options)
    ids: list[int] = []
    labels: list[bool] = []
    documents: list[Document] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:turn], options, answer_next=True)
        whole = _render(tokenizer, messages[: turn + 1], options)
        start = _common_prefix(prompt, whole)
        if start < len(prompt) and start < len(_render(tokenizer, messages[:turn], options)):
            raise RecordError(
                f"{place}: the chat template rewrites what stands before the answer of turn {turn + 1}, so its labels "
                "cannot be found; give the source a chat_template that only appends",
                "rewritten by the chat template",
            )
        if whole[: len(ids)] != ids:
            documents.append(_document(ids, labels))
            ids, labels = [], []
        # Between the last answer and this one stands the prompt: seen, never a label. What a template adds after the
        # end of the turn (ChatML's newline) is never generated either.
        end = next(
            (n + 1 for n in range(len(whole) - 1, start - 1, -1) if whole[n] == tokenizer.eos_token_id), len(whole)
        )
        labels = labels + [False] * (start - len(labels))
        labels += [n < end for n in range(len(labels), len(whole))]
        ids = whole
    return [*documents, _document(ids, labels)] if ids else documents


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    place: str = "conversation",
    template: str | None = None,
    tools: list[Any] | None = None,
) -> list[int] | None:
    """The conversation up to its last answer, ready to be answered anew; None if it holds no answer."""
    options = {"place": place, "chat_template": template, "tools": tools}
    messages = _prepared(tokenizer, messages, options)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return None
    return _render(tokenizer, messages[: turns[-1]], options, answer_next=True)


def check_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse chat data for a tokenizer that has no chat template."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"{name}: the target's tokenizer has no chat template, which chat data needs; "
            "give the source a chat_template file, or use kind text"
        )


def _prepared(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: dict[str, Any]
) -> Sequence[Message]:
    """The conversation, with its calls of tools in a form that the template renders. RecordError where there is none,
    and for an answer to nothing."""
    place = options["place"]
    opening = next((message["role"] for message in messages if message["role"] != "system"), None)
    if opening == "assistant":
        raise RecordError(f"{place}: begins with an answer; expected what it answers", "beginning with an answer")
    if not any("tool_calls" in message for message in messages):
        return messages
    fault = RecordError(f"{place}: the chat template renders no tool calls; leave it out", "tool calls not rendered")
    silent = None
    plain = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
    with suppress(RecordError):
        silent = apply_template(plain, tokenizer, **options)
    for as_json in (False, True):
        form = [_with_arguments(message, as_json, place) for message in messages]
        try:
            if apply_template(form, tokenizer, **options) != silent:
                return form
        except RecordError as error:
            fault = error
    raise fault


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


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: dict[str, Any],
    *,
    answer_next: bool = False,
) -> list[int]:
    if not messages and not answer_next:
        return []
    text = apply_template(messages, tokenizer, add_generation_prompt=answer_next, **options)
    ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return ids


def _document(ids: list[int], labels: list[bool]) -> Document:
    return Document(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.bool_))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
