"""Conversations as token ids with a label mask, by rendering the tokenizer's own chat template turn by turn.

What the template adds around an answer is never guessed. The prompt of turn i is the template over the turns before it,
with the generation prompt; the answer is what the template over the turns up to i adds to that. A template that
rewrites earlier turns (one that drops the reasoning of past answers) gives every answer a document of its own, as the
model sees it when it answers.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from eval.messages import Message, apply_template
from heads.errors import UserError
from train.packing import Document


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
) -> list[Document]:
    """Documents of a conversation whose labels are the assistant's answers; none if it holds no answer.

    One document, unless the template renders a turn differently once others follow.
    """
    ids: list[int] = []
    labels: list[bool] = []
    documents: list[Document] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:turn], place, template, answer_next=True)
        whole = _render(tokenizer, messages[: turn + 1], place, template)
        start = _common_prefix(prompt, whole)
        if start < len(prompt) and start < len(_render(tokenizer, messages[:turn], place, template)):
            raise UserError(
                f"{place}: the chat template rewrites what stands before the answer of turn {turn + 1}, so its labels "
                "cannot be found; give the source a chat_template that only appends"
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
) -> list[int] | None:
    """The conversation up to its last answer, ready to be answered anew; None if it holds no answer."""
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return None
    return _render(tokenizer, messages[: turns[-1]], place, template, answer_next=True)


def check_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse chat data for a tokenizer that has no chat template."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"{name}: the target's tokenizer has no chat template, which chat data needs; "
            "give the source a chat_template file, or use kind text"
        )


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    place: str,
    template: str | None,
    *,
    answer_next: bool = False,
) -> list[int]:
    if not messages and not answer_next:
        return []
    text = apply_template(messages, tokenizer, place, add_generation_prompt=answer_next, chat_template=template)
    ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return ids


def _document(ids: list[int], labels: list[bool]) -> Document:
    return Document(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.bool_))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
