"""The recipe's data sources. Each kind reads its records as documents, and as prompts for the target to answer."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field

from eval.benchmark.python_source import read_split
from eval.benchmark.records import (
    RecordError,
    content_hash,
    read_messages,
    read_records,
    read_text,
    read_tools,
)
from heads.errors import UserError
from heads.files import is_file, read_given
from train.data.chats import (
    Conversation,
    encode_conversations,
    encode_text,
    read_conversation,
)
from train.data.corpus import Document, Tally
from train.data.dialogues import Dialogue, answer_by_answer, lone
from train.data.templates import ChatTemplate
from train.strict_yaml import Count, Name, Settings, Weight

Say = Callable[[str], None]
T = TypeVar("T")
MIN_PROMPT_CHARACTERS = 40
MOST_REASONS = 5
"""Number of reasons to list for records left out, the most common first."""
BATCH = 256
"""Texts tokenised together."""
BATCH_CHARACTERS = 2**20
"""Characters of texts at which fewer than `BATCH` texts are tokenised."""


class Texts:
    """The common base of sources of plain text."""

    def texts(self) -> Iterator[str]:
        """Yield each text, in order."""
        raise NotImplementedError

    def documents(self, rendering: ChatTemplate, tally: Tally) -> Iterator[Document]:
        """Yield every text as a document."""
        for texts in _together(self.texts(), len):
            tally.records += len(texts)
            yield from encode_text(rendering.tokenizer, texts)

    def dialogues(
        self, rendering: ChatTemplate, tally: Tally, most: int, wanted: int | None, seed: int, *, recorded: bool = False
    ) -> Iterator[Dialogue]:
        """Yield `wanted` single prompts of `most` / 4 to `most` tokens, cut from texts, or one of each text. A prompt
        begins at the start of a text, or at a line start after a random point in its first three quarters."""
        tokenizer, random = rendering.tokenizer, np.random.default_rng((seed, 3))
        for text in islice(self._over_and_over(wanted), wanted):
            length = int(random.integers(max(1, most // 4), most + 1))
            # A quarter of the prompts begin at the start of a document, the other ones at a line inside it.
            inside = random.random() >= 0.25
            start = text.find("\n", int(random.integers(0, len(text) * 3 // 4 + 1))) + 1 if inside else 0
            # No tokenizer averages more than 16 characters of real text per token.
            window = text[start : start + 16 * length]
            ids = tokenizer(window, return_attention_mask=False, verbose=False)["input_ids"]
            if ids[-1:] == [tokenizer.eos_token_id]:
                ids = ids[:-1]
            yield Dialogue(lone(ids[:length] or tokenizer(text, verbose=False)["input_ids"][:length]))

    def _over_and_over(self, most: int | None) -> Iterator[str]:
        """Yield those of the first `most` texts that are long enough for prompts, over and over; None: all, once."""
        found = True
        while found:
            found = False
            for text in islice(self.texts(), most):
                if len(text) >= MIN_PROMPT_CHARACTERS:
                    found = most is not None
                    yield text

    def check(self, tally: Tally) -> None:
        """Do nothing, since every text can be used."""


class PythonSource(Texts, Settings):
    """Modules of Python's standard library. No download is needed. Some modules are held out for evaluation."""

    kind: Literal["python"]
    """The kind of source."""
    limit: Count | None = None
    """Maximum number of modules to read. Null: all."""
    weight: Weight = None
    """Share of the training rows and prompts, relative to the other sources. Give every source a weight, or none.
    Without weights, rows are in proportion to the size of each source, and prompts are split evenly."""

    def __str__(self) -> str:
        return "installed Python source"

    def texts(self) -> Iterator[str]:
        return (text for _, text in islice(read_split(held_out=False), self.limit))

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        """Return the plain values on which the documents depend, apart from the tokenizer."""
        content = hashlib.sha256()
        for text in self.texts():
            content.update(hashlib.sha256(text.encode()).digest())
        return {"kind": self.kind, "content": content.hexdigest()}


class RecordSource(Settings):
    """Records of a .jsonl, .json, .parquet or .txt file, of a .gz file of JSON, or of a data set on the Hub."""

    path: Name
    """A file, or the Hub id of a data set."""
    split: str = "train"
    """Split of a Hub data set. A file has no splits."""
    limit: Count | None = None
    """Maximum number of records to read. Null: all."""
    weight: Weight = None
    """Share of the training rows and prompts, relative to the other sources. Give every source a weight, or none.
    Without weights, rows are in proportion to the size of each source, and prompts are split evenly."""

    def __str__(self) -> str:
        return self.path

    @property
    def is_local(self) -> bool:
        """Return True for a file, False for a data set on the Hub."""
        return is_file(self.path)

    def content(self) -> dict[str, Any]:
        """Return the plain values on which the records depend."""
        return {"content": content_hash(self.path, split=self.split), "limit": self.limit}


class TextSource(Texts, RecordSource):
    """Plain text: records with a `text` field, or a .txt file. Every token is a label."""

    kind: Literal["text"]
    """The form of the source."""

    def texts(self) -> Iterator[str]:
        return (read_text(record) for record in read_records(self.path, split=self.split, limit=self.limit))

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        """Return the plain values on which the documents depend, apart from the tokenizer."""
        return {"kind": self.kind, **self.content()}


class ChatSource(RecordSource):
    """Conversations: records with `messages`, `conversations`, or `instruction` and `response`. The labels are the
    tokens of the assistant's answers."""

    kind: Literal["chat"]
    """The form of the source."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the tokenizer's template."""
    answers: Literal["all", "last"] = "all"
    """`last` trains only on the last answer of each conversation. This saves tokens if the chat template rewrites
    earlier turns, since each answer then needs its own document. `data.regenerate` then generates only the last answer,
    after the recorded turns."""
    max_skipped: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Maximum fraction of records that cannot be used: without an answer, with an unknown role, or refused by the chat
    template. Above it, training does not start."""

    def template(self, rendering: ChatTemplate) -> ChatTemplate:
        """Return the chat template of the conversations. UserError if there is none."""
        given = self.chat_template
        text = None if given is None else read_given(Path(given), "a Jinja chat template")
        template = replace(rendering, text=text)
        template.check(self.path)
        return template

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        """Return the plain values on which the documents depend, apart from the tokenizer."""
        template = self.template(rendering)
        return {"kind": self.kind, "answers": self.answers, **self.content(), **template.key()}

    def documents(self, rendering: ChatTemplate, tally: Tally) -> Iterator[Document]:
        """Yield the documents of every conversation with an answer, rendered by the chat template."""
        template = self.template(rendering)

        def read(place: str, messages: Any, tools: Any) -> Conversation:
            return read_conversation(template, messages, place=place, tools=tools, last_only=self.answers == "last")

        for conversations in _together(self._read(read, tally), len):
            for conversation, found in zip(conversations, encode_conversations(template, conversations), strict=True):
                if isinstance(found, RecordError):
                    _skip(tally, found, self.path)
                    continue
                labelled = [document for document in found if document.labels.any()]
                if not labelled:
                    what = f"{conversation.place}: expected an answer of the assistant, got none"
                    _skip(tally, RecordError(what, "without an answer"), self.path)
                    continue
                tally.last_tokens += len(labelled[-1].ids)
                yield from labelled

    def dialogues(
        self, rendering: ChatTemplate, tally: Tally, most: int, wanted: int | None, seed: int, *, recorded: bool = False
    ) -> Iterator[Dialogue]:
        """Yield the first `wanted` conversations (None: all) whose first prompt has at most `most` tokens. `recorded`:
        only the last turn of the assistant is to be answered, even if it calls tools."""
        template, last_only = self.template(rendering), self.answers == "last"

        def read(place: str, messages: Any, tools: Any) -> Dialogue:
            how: dict[str, Any] = {"most": most, "last_only": last_only or recorded, "calls": recorded}
            return Dialogue(answer_by_answer(template, messages, place=place, tools=tools, **how))

        def fitting() -> Iterator[Dialogue]:
            for dialogue in self._read(read, tally):
                if dialogue.prompt is not None:
                    yield dialogue
                else:
                    tally.too_long += 1

        return islice(fitting(), wanted)

    def check(self, tally: Tally) -> None:
        """Raise UserError if more records are unusable than the source allows."""
        most = self.max_skipped
        if sum(tally.skipped.values()) > most * tally.records:
            raise UserError(
                f"{describe_skipped(tally, self.path)}; mend them, or allow more than max_skipped={most:g} of this "
                "source"
            )

    def _read(self, encode: Callable[[str, Any, Any], T], tally: Tally) -> Iterator[T]:
        """Yield `encode(location, turns, tools)` of each usable record, and count the records."""
        for record in read_records(self.path, split=self.split, limit=self.limit):
            tally.records += 1
            try:
                found = encode(record[0], read_messages(record), read_tools(record))
            except RecordError as error:
                _skip(tally, error, self.path)
            else:
                yield found


AnySource = Annotated[PythonSource | TextSource | ChatSource, Field(discriminator="kind")]


def describe_skipped(tally: Tally, name: str) -> str:
    """Return one line with the number of records of a source that are left out, by reason."""
    named = sorted(tally.skipped.items(), key=lambda pair: -pair[1])
    reasons = ", ".join(f"{count} {reason}" for reason, count in named[:MOST_REASONS])
    rest = sum(count for _, count in named[MOST_REASONS:])
    more = f", {rest} others" if rest else ""
    return (
        f"{name}: {sum(tally.skipped.values())} of {tally.records} records are left out: {reasons}{more}; "
        f"the first is {name}{tally.first_skipped}"
    )


def _skip(tally: Tally, error: RecordError, name: str) -> None:
    tally.skipped[error.reason] = tally.skipped.get(error.reason, 0) + 1
    tally.first_skipped = tally.first_skipped or str(error).removeprefix(name)


def _together(texts: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the texts in lists that are long enough for several tokenizer threads. `size`: characters of a text."""
    held: list[T] = []
    characters = 0
    for text in texts:
        held.append(text)
        characters += size(text)
        if len(held) == BATCH or characters >= BATCH_CHARACTERS:
            yield held
            held, characters = [], 0
    if held:
        yield held
