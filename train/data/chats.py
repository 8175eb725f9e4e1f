"""Conversations as token ids with a label mask, from the text that the chat template renders, and as prompts.

A label is a token that the target itself would write after the prompt as its server builds it: the chat template with
`add_generation_prompt` and the recipe's template arguments. So nothing is a label that the template puts in place of a
reasoning which the record does not hold, and nothing after the token that ends the answer: the first of the target's
end ids, or, where no token ends an answer, the beginning of the next turn. Answers of weight 0 are context.

The code does not guess what the template adds around an answer. The prompt of turn i is the rendered text of the turns
before it, with the opening of an answer. The answer is what the rendered text of the turns up to i adds to the prompt.
If each of these texts is a prefix of the next, only the last one is tokenised, and the offsets of its tokens locate the
answers. If a template rewrites earlier turns, for example by dropping the reasoning of past answers, every answer gets
its own document, as the model sees it when it answers. A template that drops the reasoning of every answer, though its
prompt opens one (DeepSeek-R1), cannot render what the target writes: there the reasoning follows the prompt, is closed,
and the answer follows as the template renders it.

Offsets give correct labels only if a token begins at each boundary of a turn, so that no merge crosses one. Every other
conversation is tokenised turn by turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eval.measure.records import Message, RecordError
from train.data.corpus import Document
from train.data.templates import ChatTemplate, common_prefix

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a turn in which records store the reasoning before an answer."""
REASONING_END = "</think>"
OPENS_REASONING = re.compile(r"<(\w+)>\s*$")
KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "weight", *REASONING})
"""Keys of a turn whose meaning is known."""
WEIGHT_LIKE = re.compile("weight|train|loss|mask|learn|supervis|ignore")
"""Matches other names that turns may have for their weight."""


class Turn(NamedTuple):
    """An answer of a conversation, as the template renders it."""

    prompt: str
    """The text up to the answer's first label."""
    whole: str
    """The text up to and including the answer's last label. It begins with `prompt`."""


@dataclass(frozen=True)
class Conversation:
    """A conversation with the answers to train on."""

    turns: Sequence[Turn]
    place: str
    notes: Sequence[str] = ()
    """What is worth saying of its answers, in general words."""


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
    turns: list[Turn] = []
    notes: list[str] = []
    for number in trained_answers(messages, place)[-1 if last_only else 0 :]:
        turn, note = _read_answer(template, messages[: number + 1], place, tools)
        turns.append(turn)
        notes += note
    return Conversation(turns, place, notes)


def trained_answers(messages: Sequence[Message], place: str) -> list[int]:
    """Return the numbers of the answers to train on. RecordError if there is none."""
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [n for n in answers if messages[n].get("weight") != 0]
    if trained:
        return trained
    if answers:
        what = "expected an answer to train on, got only answers of weight 0"
        raise RecordError(f"{place}: {what}", "whose answers all have weight 0")
    raise RecordError(f"{place}: expected an answer of the assistant, got none", "without an answer")


def _read_answer(template: ChatTemplate, messages: Sequence[Message], place: str, tools: Any) -> tuple[Turn, list[str]]:
    """Return the last turn of `messages` as the target would write it, and notes on it."""
    *before, message = messages
    frame, number = template.frame, len(messages)
    prompt = template.render(before, place=place, tools=tools, answer_next=True)
    whole = template.render(messages, place=place, tools=tools)
    head = prompt.removesuffix(frame.opened)
    if not whole.startswith(head):
        whole = head + _after(before, head, whole, place)
    bare = head + frame.empty
    reasoning = [*filter(None, _reasoning(message))]
    notes = [weight_like(key) for key in message.keys() - KNOWN if WEIGHT_LIKE.search(key)]
    if reasoning:
        tag = OPENS_REASONING.search(prompt)
        close = f"</{tag[1]}>" if tag is not None else ""
        answer = whole[len(bare) :] if tag is not None and whole.startswith(bare) else None
        if not all(text in whole[len(head) :] for text in reasoning) or (answer is not None and close not in answer):
            if answer is None:
                raise RecordError(
                    f"{place}: the chat template drops the reasoning of turn {number}, which the target would write; "
                    "give the source a chat_template that keeps it, or records without",
                    "with reasoning that the chat template drops",
                )
            if not bare.endswith(close):
                close, answer = f"\n{close}\n\n", answer.lstrip("\n")
            whole = prompt + reasoning[0] + close + answer
    elif bare != prompt and whole.startswith(bare):
        prompt = bare
        if (frame.opened + frame.empty).strip():
            notes.append(template.unreasoned)
    if not whole.startswith(prompt):
        prompt = prompt[: common_prefix(prompt, whole)]
    if (end := template.ends.search(whole, len(prompt))) is not None:
        whole = whole[: end.end()]
    else:
        whole += frame.following.get("tool" if "tool_calls" in message else "user", "")
    return Turn(prompt, whole), notes


def _after(before: Sequence[Message], head: str, whole: str, place: str) -> str:
    """Return the text of an answer in `whole`, which does not begin as its prompt, as where a template renders the
    system prompt in the newest question (Mistral): what follows the end that the newest turn has in the prompt."""
    newest = before[-1]["content"].strip() if before else ""
    end = head[head.rfind(newest) :] if newest and newest in head else head
    if end not in whole:
        raise RecordError(
            f"{place}: the chat template rewrites what stands before the answer of turn {len(before) + 1}, so its "
            "labels cannot be found; give the source a chat_template that only appends",
            "rewritten by the chat template",
        )
    return whole.rpartition(end)[2]


def weight_like(key: str) -> str:
    return f"answers have a key {key!r}, which is not read; if it marks what not to train on, call it weight (0 or 1)"


def _reasoning(message: Message) -> Iterator[str]:
    yield from (message[key].strip() for key in REASONING if isinstance(message.get(key), str))
    content = message["content"]
    if REASONING_END in content:
        yield content.split(REASONING_END)[0].split("<think>")[-1].strip()


def encode_conversations(template: ChatTemplate, conversations: Sequence[Conversation]) -> Iterator[list[Document]]:
    """Yield the documents of each conversation, whose labels are its answers."""
    tokenizer = template.tokenizer
    groups = [_joined(conversation.turns) if tokenizer.is_fast else [] for conversation in conversations]
    texts = [turns[-1].whole for found in groups for turns in found]
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    encodings = iter(tokenizer(texts, **options).encodings or () if texts else ())
    ends = template.all_end_ids
    for conversation, found in zip(conversations, groups, strict=True):
        # Take all encodings of this conversation first, so that the next one gets its own.
        pairs = [(turns, next(encodings)) for turns in found]
        labelled = [_labelled(turns, encoding, ends) for turns, encoding in pairs]
        documents = [document for document in labelled if document is not None]
        whole = len(documents) == len(found) > 0
        yield documents if whole else encode_turn_by_turn(tokenizer, conversation.turns)


def encode_turn_by_turn(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]) -> list[Document]:
    """Return the documents of a conversation from tokens of each turn's own texts."""
    pairs = ((token_ids(tokenizer, turn.prompt), token_ids(tokenizer, turn.whole)) for turn in turns)
    return join_texts((common_prefix(prompt, whole), whole) for prompt, whole in pairs)


def join_texts(texts: Iterable[tuple[int, list[int]]], *, train_on_prompts: bool = False) -> list[Document]:
    """Return texts, each with the length of its prompt, as documents. The labels are the answers' tokens. A text that
    begins with the whole document before it continues that document; another text begins a new one."""
    ids: list[int] = []
    labels: list[bool] = []
    documents: list[Document] = []
    for prompt, text in texts:
        if text[: len(ids)] != ids:
            documents.append(Document.of(ids, labels))
            ids, labels = [], []
        start = max(len(labels), prompt)
        labels = labels + [train_on_prompts] * (start - len(labels)) + [True] * (len(text) - start)
        ids = text
    return [*documents, Document.of(ids, labels)] if ids else documents


def _joined(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return groups of turns in which each text is a prefix of the next."""
    found: list[list[Turn]] = []
    for turn in turns:
        if found and turn.prompt.startswith(found[-1][-1].whole):
            found[-1].append(turn)
        else:
            found.append([turn])
    return found


def _labelled(turns: Sequence[Turn], encoding: Encoding, ends: Collection[int]) -> Document | None:
    """Return the document of turns that share a text, or None if no token begins at one of the turns' boundaries."""
    labels = np.zeros(len(encoding.ids), dtype=np.bool_)
    length = len(turns[-1].whole)
    for turn in turns:
        start, stop = (_token_at(encoding, len(text), length, ends) for text in turn)
        if start is None or stop is None:
            return None
        labels[start:stop] = True
    return Document.of(encoding.ids, labels)


def _token_at(encoding: Encoding, at: int, length: int, ends: Collection[int]) -> int | None:
    """Return the token that begins at a place of a text of this length. None if there is none."""
    if at == length:
        return len(encoding.ids)
    token = encoding.char_to_token(at)
    if token is None:
        return None
    bounds = encoding.token_to_chars(token)
    if bounds is not None and bounds[0] == at:
        return token
    # The end token of some tokenizers takes the space after it along.
    return token + 1 if encoding.ids[token] in ends else None


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return ids


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
    are kept, since the next turns answer their calls, and so are answers of weight 0, which are context. It ends before
    a prompt of more than `most` tokens.

    `last_only`: the target gives only the last answer. `calls`: a turn that calls tools also counts as an answer.
    RecordError for a conversation without a first prompt.
    """
    messages = list(template.prepared(messages, place=place, tools=tools))
    tokenizer = template.tokenizer
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    turns = [n for n in trained_answers(messages, place) if calls or "tool_calls" not in messages[n]]
    if not turns:
        raise RecordError(f"{place}: expected an answer of the assistant, got none", "without an answer")
    for turn in turns[-1:] if last_only else turns:
        try:
            prompt = token_ids(tokenizer, template.render(messages[:turn], place=place, tools=tools, answer_next=True))
            template.check_ids(prompt, place)
        except RecordError as error:
            if turn == turns[0] or last_only:
                raise
            return f"a turn {error.reason}"
        if len(prompt) > most:
            return f"a prompt of more than {most} tokens"
        answer = yield prompt
        said = answer[:-1] if answer[-1] in special | template.all_end_ids else answer
        if turn != turns[-1] and not special.isdisjoint(said):
            # Such as channels and calls: only the template knows which turn they would belong to.
            return "a turn on an answer with special tokens"
        text = str(tokenizer.decode(said, clean_up_tokenization_spaces=False))
        messages[turn] = {"role": "assistant", "content": text}
    return None
