"""Conversations as token ids with a label mask, from the text that the chat template renders, and as prompts.

The code does not guess what the template adds around an answer. The prompt of turn i is the rendered text of the turns
before it, with the opening of an answer. The answer is what the rendered text of the turns up to i adds to the prompt.
If each of these texts is a prefix of the next, only the last one is tokenised, and the offsets of its tokens locate the
answers. If a template rewrites earlier turns, for example by dropping the reasoning of past answers, every answer gets
its own document, as the model sees it when it answers.

Offsets give correct labels only if a token begins at each boundary of a turn, so that no merge crosses one. Every other
conversation is tokenised turn by turn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.measure.records import Message, RecordError
from train.data.cache import Document
from train.data.templates import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a turn in which records store the reasoning before an answer."""
REASONING_END = "</think>"


@dataclass(frozen=True)
class Turn:
    """An answer of a conversation, as the template renders it."""

    before: Sequence[Message]
    """The turns before the answer."""
    prompt: str
    """The text up to the answer, including the answer's opening."""
    whole: str
    """The text of the conversation up to and including this answer."""

    @property
    def answer(self) -> str:
        return self.whole[_common_prefix(self.prompt, self.whole) :]


@dataclass(frozen=True)
class Conversation:
    """A conversation with the answers to train on."""

    turns: Sequence[Turn]
    place: str
    tools: Any = None


def encode_text(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Iterator[Document]:
    """Yield plain texts as documents, with the tokenizer's own special tokens and a final end-of-text token. Every
    token is a label."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for ids in tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]:
        whole = ids if end and ids[-1:] == end else [*ids, *end]
        yield Document.of(whole, np.ones(len(whole)))


def read_conversation(
    template: ChatTemplate, messages: Sequence[Message], *, place: str, tools: Any = None, last_only: bool = False
) -> Conversation:
    """Render all answers of a conversation, or only the last one. RecordError if it cannot be trained on."""
    messages = template.prepared(messages, place=place, tools=tools)
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    turns = []
    for turn in answers[-1:] if last_only else answers:
        before, until = messages[:turn], messages[: turn + 1]
        prompt = template.render(before, place=place, tools=tools, answer_next=True)
        whole = template.render(until, place=place, tools=tools)
        turns.append(Turn(before, prompt, whole))
        if not all(reasoning in turns[-1].answer for reasoning in _reasoning(messages[turn])):
            raise RecordError(
                f"{place}: the chat template drops the reasoning of turn {turn + 1}, which the target would write; "
                "give the source a chat_template that keeps it, or records without",
                "with reasoning that the chat template drops",
            )
    return Conversation(turns, place, tools)


def encode_conversations(
    template: ChatTemplate, conversations: Sequence[Conversation]
) -> Iterator[list[Document] | RecordError]:
    """Yield the documents of each conversation, whose labels are its answers, or the reason why it has none."""
    tokenizer = template.tokenizer
    groups = [_joined(conversation.turns) if tokenizer.is_fast else None for conversation in conversations]
    texts = [turns[-1].whole for found in groups for turns in found or ()]
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    encodings = iter(tokenizer(texts, **options).encodings or () if texts else ())
    for conversation, found in zip(conversations, groups, strict=True):
        # Take all encodings of this conversation first, so that the next one gets its own.
        pairs = [(turns, next(encodings)) for turns in found or ()]
        labelled = [_labelled(turns, encoding, tokenizer.eos_token_id) for turns, encoding in pairs]
        documents = [document for document in labelled if document is not None]
        try:
            whole = found is not None and len(documents) == len(found)
            yield documents if whole else encode_turn_by_turn(template, conversation)
        except RecordError as error:
            yield error


def encode_turn_by_turn(template: ChatTemplate, conversation: Conversation) -> list[Document]:
    """Return the documents of a conversation from tokens of each turn's own texts. RecordError if the labels cannot be
    found."""
    tokenizer, place = template.tokenizer, conversation.place
    ids: list[int] = []
    labels: list[bool] = []
    documents: list[Document] = []
    for turn in conversation.turns:
        prompt, whole = token_ids(tokenizer, turn.prompt), token_ids(tokenizer, turn.whole)
        start = _common_prefix(prompt, whole)
        if start < len(prompt):
            before = template.render(turn.before, place=place, tools=conversation.tools)
            if start < len(token_ids(tokenizer, before)):
                raise RecordError(
                    f"{place}: the chat template rewrites what stands before the answer of turn "
                    f"{len(turn.before) + 1}, so its labels cannot be found; give the source a chat_template that only "
                    "appends",
                    "rewritten by the chat template",
                )
        if whole[: len(ids)] != ids:
            documents.append(Document.of(ids, labels))
            ids, labels = [], []
        # The prompt between the last answer and this one is context, never a label.
        end = _answer_end(whole, start, len(whole), tokenizer.eos_token_id)
        labels = labels + [False] * (start - len(labels))
        labels += [n < end for n in range(len(labels), len(whole))]
        ids = whole
    return [*documents, Document.of(ids, labels)] if ids else documents


def _reasoning(message: Message) -> Iterator[str]:
    yield from (message[key].strip() for key in REASONING if isinstance(message.get(key), str))
    content = message["content"]
    if REASONING_END in content:
        yield content.split(REASONING_END)[0].split("<think>")[-1].strip()


def _joined(turns: Sequence[Turn]) -> list[list[Turn]] | None:
    """Return groups of turns in which each text is a prefix of the next. None if a text does not begin with its
    prompt."""
    found: list[list[Turn]] = []
    for turn in turns:
        if not turn.whole.startswith(turn.prompt):
            return None
        if found and turn.whole.startswith(found[-1][-1].whole):
            found[-1].append(turn)
        else:
            found.append([turn])
    return found


def _labelled(turns: Sequence[Turn], encoding: Encoding, eos: int | None) -> Document | None:
    """Return the document of turns that share a text, or None if no token begins at one of the turns' boundaries."""
    ids = encoding.ids
    labels = np.zeros(len(ids), dtype=np.bool_)
    for turn in turns:
        start, stop = (_token_at(encoding, len(text), len(turns[-1].whole)) for text in (turn.prompt, turn.whole))
        if start is None or stop is None:
            return None
        labels[start : _answer_end(ids, start, stop, eos)] = True
    return Document.of(ids, labels)


def _token_at(encoding: Encoding, at: int, length: int) -> int | None:
    if at == length:
        return len(encoding.ids)
    token = encoding.char_to_token(at)
    bounds = None if token is None else encoding.token_to_chars(token)
    return None if bounds is None or bounds[0] != at else token


def _answer_end(ids: Sequence[int], start: int, stop: int, eos: int | None) -> int:
    """Return the end of an answer in ids[start:stop]. Text that a template adds after the end token, such as ChatML's
    newline, is never generated, so it is no label."""
    return next((n + 1 for n in range(stop - 1, start - 1, -1) if ids[n] == eos), stop)


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return ids


def _common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


Prompts = Generator[list[int], list[int], str | None]
"""Yields prompts and is sent their answers. Returns why it ends before the end of the record, or None."""


class Dialogue:
    """The prompts of one record, with their answers."""

    def __init__(self, prompts: Prompts, about: Mapping[str, str] | None = None) -> None:
        self._prompts = prompts
        self.about = about or {}
        """What a document says of the record: its `form`, `unread` and `notes`."""
        self.prompt: list[int] | None = None
        """Token ids of the next prompt, or None at the end."""
        self.exchanges: list[tuple[list[int], list[int]]] = []
        self.cut: str | None = None
        """Reason why the dialogue ended before its record, or None."""
        self._next(None)

    def answer(self, ids: list[int]) -> None:
        assert self.prompt is not None
        self.exchanges.append((self.prompt, ids))
        self._next(ids)

    def take(self, kept: Callable[[list[int]], list[int] | None]) -> None:
        while self.prompt is not None and (ids := kept(self.prompt)) is not None:
            self.answer(ids)

    def _next(self, answer: Any) -> None:
        try:
            self.prompt = self._prompts.send(answer)
        except StopIteration as end:
            self.prompt, self.cut = None, end.value


def lone(prompt: list[int]) -> Prompts:
    yield prompt
    return None


def answer_by_answer(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    place: str,
    tools: Any = None,
    most: int,
    last_only: bool = False,
    calls: bool = False,
) -> Prompts:
    """Yield the prompts of a conversation, in which the target's answers replace the assistant's. Turns that call tools
    are kept, since the next turns answer their calls. It ends before a prompt of more than `most` tokens.

    `last_only`: the target gives only the last answer. `calls`: a turn that calls tools also counts as an answer.
    RecordError for a conversation without a first prompt.
    """
    messages = list(template.prepared(messages, place=place, tools=tools))
    tokenizer = template.tokenizer
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    answers = (n for n, message in enumerate(messages) if message["role"] == "assistant")
    turns = [n for n in answers if calls or "tool_calls" not in messages[n]]
    if not turns:
        raise RecordError(f"{place}: expected an answer of the assistant, got none", "without an answer")
    for turn in turns[-1:] if last_only else turns:
        try:
            text = template.render(messages[:turn], place=place, tools=tools, answer_next=True)
        except RecordError as error:
            if turn == turns[0] or last_only:
                raise
            return f"a turn {error.reason}"
        prompt = token_ids(tokenizer, text)
        if len(prompt) > most:
            return f"a prompt of more than {most} tokens"
        answer = yield prompt
        said = answer[:-1] if answer[-1] in special else answer
        if turn != turns[-1] and not special.isdisjoint(said):
            # Such as channels and calls: only the template knows which turn they would belong to.
            return "a turn on an answer with special tokens"
        messages[turn] = {"role": "assistant", "content": str(tokenizer.decode(said))}
    return None
