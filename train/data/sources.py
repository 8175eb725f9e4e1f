"""The recipe's sources: what each kind reads, as documents and as prompts for the target to answer."""

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
"""Named of the reasons for leaving records out, the commonest first."""
BATCH = 256
"""Texts tokenised together."""
BATCH_CHARACTERS = 2**20
"""Characters of texts, from which on they are tokenised though they are fewer."""


class Texts:
    """The part that sources of plain text have in common."""

    def texts(self) -> Iterator[str]:
        """Each text, in order."""
        raise NotImplementedError

    def documents(self, rendering: ChatTemplate, tally: Tally) -> Iterator[Document]:
        """Every text as a document."""
        for texts in _together(self.texts(), len):
            tally.records += len(texts)
            yield from encode_text(rendering.tokenizer, texts)

    def dialogues(
        self, rendering: ChatTemplate, tally: Tally, most: int, wanted: int, seed: int, *, recorded: bool = False
    ) -> Iterator[Dialogue]:
        """Openings at line starts in the first three quarters of texts, `most` / 4 to `most` tokens long, each by
        itself."""
        tokenizer, random = rendering.tokenizer, np.random.default_rng((seed, 3))
        for text in islice(self._over_and_over(wanted), wanted):
            length = int(random.integers(max(1, most // 4), most + 1))
            # A quarter of the prompts open a document; the others begin at a line somewhere inside it.
            inside = random.random() >= 0.25
            start = text.find("\n", int(random.integers(0, len(text) * 3 // 4 + 1))) + 1 if inside else 0
            # No tokenizer packs more than 16 characters of real text in a token, on average.
            window = text[start : start + 16 * length]
            ids = tokenizer(window, return_attention_mask=False, verbose=False)["input_ids"]
            if ids[-1:] == [tokenizer.eos_token_id]:
                ids = ids[:-1]
            yield Dialogue(lone(ids[:length] or tokenizer(text, verbose=False)["input_ids"][:length]))

    def _over_and_over(self, most: int) -> Iterator[str]:
        """The first `most` texts that are long enough for prompts, without end."""
        found = True
        while found:
            found = False
            for text in islice(self.texts(), most):
                if len(text) >= MIN_PROMPT_CHARACTERS:
                    found = True
                    yield text

    def check(self, tally: Tally) -> None:
        """Every text can be used."""


class PythonSource(Texts, Settings):
    """Modules of Python's standard library. No download is needed; some modules are held out for evaluation."""

    kind: Literal["python"]
    """The form of the source."""
    limit: Count | None = None
    """Most modules to read. Null: all."""
    weight: Weight = None
    """Share of the training rows and prompts, relative to the other sources. Give every source a weight, or none:
    then rows are shared in proportion to size, and prompts evenly."""

    def __str__(self) -> str:
        return "installed Python source"

    def texts(self) -> Iterator[str]:
        return (text for _, text in islice(read_split(held_out=False), self.limit))

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        """Plain values on which the documents depend, beside the tokenizer."""
        content = hashlib.sha256()
        for text in self.texts():
            content.update(hashlib.sha256(text.encode()).digest())
        return {"kind": self.kind, "content": content.hexdigest()}


class RecordSource(Settings):
    """Records of a .jsonl, .json, .parquet or .txt file (.gz too where it is JSON), or of a data set on the Hub."""

    path: Name
    """A file, or the Hub id of a data set."""
    split: str = "train"
    """Split of a Hub data set. A file has none."""
    limit: Count | None = None
    """Most records to read. Null: all."""
    weight: Weight = None
    """Share of the training rows and prompts, relative to the other sources. Give every source a weight, or none:
    then rows are shared in proportion to size, and prompts evenly."""

    def __str__(self) -> str:
        return self.path

    @property
    def is_local(self) -> bool:
        """True for a file, False for a data set on the Hub."""
        return is_file(self.path)

    def content(self) -> dict[str, Any]:
        """Plain values on which the records depend."""
        return {"content": content_hash(self.path, split=self.split), "limit": self.limit}


class TextSource(Texts, RecordSource):
    """Plain text: records with a `text` field, or a .txt file. Every token is a label."""

    kind: Literal["text"]
    """The form of the source."""

    def texts(self) -> Iterator[str]:
        return (read_text(record) for record in read_records(self.path, split=self.split, limit=self.limit))

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        """Plain values on which the documents depend, beside the tokenizer."""
        return {"kind": self.kind, **self.content()}


class ChatSource(RecordSource):
    """Conversations: records with `messages`, `conversations`, or `instruction` and `response`. The labels are the
    tokens of the assistant's answers."""

    kind: Literal["chat"]
    """The form of the source."""
    chat_template: str | None = None
    """File with a Jinja chat template, used in place of the tokenizer's own."""
    answers: Literal["all", "last"] = "all"
    """`last` trains only on the last answer of each conversation. This saves tokens under a chat template that rewrites
    earlier turns, which gives every answer a document of its own. `data.regenerate` then generates only the last
    answer, after the turns as they are recorded."""
    max_skipped: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Largest share of records to leave out because they cannot be used: no answer, an unknown role, refused by the
    chat template. Above it, training does not begin."""

    def template(self, rendering: ChatTemplate) -> ChatTemplate:
        """The chat template of the conversations. UserError where there is none, or one that does not read its
        arguments."""
        given = self.chat_template
        text = None if given is None else read_given(Path(given), "a Jinja chat template")
        template = replace(rendering, text=text)
        template.check(self.path)
        return template

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        """Plain values on which the documents depend, beside the tokenizer."""
        template = self.template(rendering)
        return {"kind": self.kind, "answers": self.answers, **self.content(), **template.key()}

    def documents(self, rendering: ChatTemplate, tally: Tally) -> Iterator[Document]:
        """Every conversation with an answer, as the documents that the chat template makes of it."""
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
        self, rendering: ChatTemplate, tally: Tally, most: int, wanted: int, seed: int, *, recorded: bool = False
    ) -> Iterator[Dialogue]:
        """The first conversations whose first prompts are no longer than `most` tokens. `recorded`: only the last turn
        of the assistant is asked for, whatever it is."""
        template, last_only = self.template(rendering), self.answers == "last"

        def read(place: str, messages: Any, tools: Any) -> Dialogue:
            how: dict[str, Any] = {"most": most, "last_only": last_only or recorded, "calls": recorded}
            return Dialogue(answer_by_answer(template, messages, place=place, tools=tools, **how))

        return islice((dialogue for dialogue in self._read(read, tally) if dialogue.prompt is not None), wanted)

    def check(self, tally: Tally) -> None:
        """UserError where more records cannot be used than the source allows."""
        most = self.max_skipped
        if sum(tally.skipped.values()) > most * tally.records:
            raise UserError(
                f"{describe_skipped(tally, self.path)}; mend them, or allow more than max_skipped={most:g} of this "
                "source"
            )

    def _read(self, encode: Callable[[str, Any, Any], T], tally: Tally) -> Iterator[T]:
        """Each usable record, as `encode` makes it of its place, its turns and its tools."""
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
    """The records of a source that are left out, by reason, in one line."""
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
    """The texts in lists long enough to be tokenised by several threads, each text of `size` characters."""
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
