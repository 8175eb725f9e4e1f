"""Conversations as token ids with a label mask, from the chat template's own text.

What the template adds around an answer is never guessed. The prompt of turn i is the template's text of the turns
before it, with the opening of an answer; the answer is what the text of the turns up to i adds to that. Where each of
these texts begins the next, the last holds them all: it alone is tokenised, and the answers are found in it by the
offsets of its tokens. A template that rewrites earlier turns (one that drops the reasoning of past answers) gives every
answer a document of its own, as the model sees it when it answers.

Offsets give the labels of the turns' own tokens only where a token begins at each of the bounds: no merge has then
crossed one. Every other conversation is tokenised turn by turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from eval.benchmark.records import Message, RecordError
from train.data.corpus import Document
from train.data.templates import ChatTemplate

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a turn in which records keep the reasoning that precedes an answer."""
REASONING_END = "</think>"


@dataclass(frozen=True)
class Turn:
    """An answer of a conversation, as the template writes it."""

    before: Sequence[Message]
    """The turns that it answers."""
    prompt: str
    """The text up to the answer, its opening included."""
    whole: str
    """The text of the conversation that ends with this answer."""

    @property
    def answer(self) -> str:
        """The part of `whole` behind the prompt."""
        return self.whole[_common_prefix(self.prompt, self.whole) :]


@dataclass(frozen=True)
class Conversation:
    """A conversation with the turns that are trained on."""

    turns: Sequence[Turn]
    place: str
    tools: Any = None

    def __len__(self) -> int:
        """Characters of the texts that are held."""
        return sum(len(turn.prompt) + len(turn.whole) for turn in self.turns)


def encode_text(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Iterator[Document]:
    """Plain text with the special tokens the tokenizer itself adds, closed by end-of-text; every token is a label."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for ids in tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"] if texts else ():
        whole = ids if end and ids[-1:] == end else [*ids, *end]
        yield Document.of(whole, np.ones(len(whole)))


def read_conversation(
    template: ChatTemplate, messages: Sequence[Message], *, place: str, tools: Any = None, last_only: bool = False
) -> Conversation:
    """Render the answers of a conversation, or only its last. RecordError for one that cannot be trained on."""
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
    """The documents of each conversation, whose labels are its answers, or the reason why it has none."""
    tokenizer = template.tokenizer
    groups = [_joined(conversation.turns) if tokenizer.is_fast else None for conversation in conversations]
    encodings = iter(_encodings(tokenizer, [turns[-1].whole for found in groups for turns in found or ()]))
    for conversation, found in zip(conversations, groups, strict=True):
        # Each takes its encodings before it looks at any, so that the next one finds its own.
        pairs = [(turns, next(encodings)) for turns in found or ()]
        labelled = [_labelled(turns, encoding, tokenizer.eos_token_id) for turns, encoding in pairs]
        documents = [document for document in labelled if document is not None]
        try:
            whole = found is not None and len(documents) == len(found)
            yield documents if whole else encode_turn_by_turn(template, conversation)
        except RecordError as error:
            yield error


def encode_turn_by_turn(template: ChatTemplate, conversation: Conversation) -> list[Document]:
    """The documents of a conversation by the tokens of each turn's own texts. RecordError without labels."""
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
        # Between the last answer and this one stands the prompt: seen, never a label.
        end = _answer_end(whole, start, len(whole), tokenizer.eos_token_id)
        labels = labels + [False] * (start - len(labels))
        labels += [n < end for n in range(len(labels), len(whole))]
        ids = whole
    return [*documents, Document.of(ids, labels)] if ids else documents


def _reasoning(message: Message) -> Iterator[str]:
    """The reasoning that a turn of a record holds."""
    yield from (message[key].strip() for key in REASONING if isinstance(message.get(key), str))
    content = message["content"]
    if REASONING_END in content:
        yield content.split(REASONING_END)[0].split("<think>")[-1].strip()


def _joined(turns: Sequence[Turn]) -> list[list[Turn]] | None:
    """The turns whose texts begin one another, together; None where a text does not begin with its prompt."""
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
    """The document of turns that share a text; None where no token begins at one of the turns' bounds."""
    ids = encoding.ids
    labels = np.zeros(len(ids), dtype=np.bool_)
    for turn in turns:
        start, stop = (_token_at(encoding, len(text), len(turns[-1].whole)) for text in (turn.prompt, turn.whole))
        if start is None or stop is None:
            return None
        labels[start : _answer_end(ids, start, stop, eos)] = True
    return Document.of(ids, labels)


def _token_at(encoding: Encoding, at: int, length: int) -> int | None:
    """The token that begins at a character of a text; one beyond the last at the end of the text."""
    if at == length:
        return len(encoding.ids)
    token = encoding.char_to_token(at)
    bounds = None if token is None else encoding.token_to_chars(token)
    return None if bounds is None or bounds[0] != at else token


def _answer_end(ids: Sequence[int], start: int, stop: int, eos: int | None) -> int:
    """The end of an answer in ids[start:stop]. What a template adds after the end of the turn (ChatML's newline) is
    never generated, and no label."""
    return next((n + 1 for n in range(stop - 1, start - 1, -1) if ids[n] == eos), stop)


def _encodings(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Sequence[Encoding]:
    if not texts:
        return []
    batch = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return batch.encodings or []


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a rendered text, to which nothing is added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return ids


def _common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
