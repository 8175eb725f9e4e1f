"""The recipe's data sources. Each kind reads its records as documents, and as prompts for the target to answer."""

import hashlib
import json
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from eval.measure.python_source import read_split
from eval.measure.records import (
    Record,
    RecordError,
    content_hash,
    read_messages,
    read_records,
    read_text,
    read_tools,
)
from heads.core.errors import UserError
from heads.core.files import is_file, read_given
from train.core.strict_yaml import Count, Name, Settings, Weight
from train.data.cache import (
    TOO_LONG,
    Corpus,
    Document,
    Reader,
    Tally,
    columns,
    corpus_in,
    document_features,
    fingerprint,
    stored,
)
from train.data.chats import (
    Conversation,
    Dialogue,
    answer_by_answer,
    encode_conversations,
    encode_text,
    lone,
    read_conversation,
)
from train.data.templates import ChatTemplate, tokenizer_key

if TYPE_CHECKING:
    from datasets import Dataset

MIN_PROMPT_CHARACTERS = 40
MOST_REASONS = 5
"""Number of reasons to list for records left out, the most common first."""
BATCH = 64
"""Records tokenised together."""
RECORDS_PER_PROCESS = 8192
"""Minimum number of records for each process that tokenises."""


class Texts(ABC):
    """The common base of sources of plain text."""

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yield each record, in order."""

    def documents(self, rendering: ChatTemplate, records: Iterable[Record]) -> Iterator[Document]:
        return encode_text(rendering.tokenizer, [read_text(record) for record in records])

    def dialogues(
        self, rendering: ChatTemplate, most: int, wanted: int | None, seed: int, *, recorded: bool = False
    ) -> Iterator[Dialogue | RecordError]:
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
        while True:
            found = False
            for text in islice(map(read_text, self.records()), most):
                if len(text) >= MIN_PROMPT_CHARACTERS:
                    found = True
                    yield text
            if not found:
                raise UserError(f"{self}: no text has {MIN_PROMPT_CHARACTERS} characters, so none gives a prompt")
            if most is None:
                return


class PythonSource(Settings, Texts):
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

    def records(self) -> Iterator[Record]:
        for place, text in islice(read_split(held_out=False), self.limit):
            yield place, {"text": text}

    def content(self) -> dict[str, Any]:
        content = hashlib.sha256()
        for record in self.records():
            content.update(hashlib.sha256(read_text(record).encode()).digest())
        return {"content": content.hexdigest()}

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        """Return the plain values on which the documents depend, apart from the records and the tokenizer."""
        return {"kind": self.kind}


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
        return is_file(self.path)

    def records(self) -> Iterator[Record]:
        return read_records(self.path, split=self.split, limit=self.limit)

    def content(self) -> dict[str, Any]:
        form = Path(self.path).suffix if self.is_local else ""
        return {"content": content_hash(self.path, split=self.split), "form": form, "limit": self.limit}


class TextSource(RecordSource, Texts):
    """Plain text: records with a `text` field, or a .txt file. Every token is a label."""

    kind: Literal["text"]
    """The form of the source."""

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        return {"kind": self.kind}


class ChatSource(RecordSource):
    """Conversations: records with `messages`, `conversations`, or `instruction` and `response`. The labels are the
    tokens of the assistant's answers."""

    kind: Literal["chat"]
    """The form of the source."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the tokenizer's template."""
    answers: Literal["all", "last"] = "all"
    """`last` trains only on the last answer of each conversation that has not weight 0. This saves tokens if the chat
    template rewrites earlier turns, since each answer then needs its own document. `data.regenerate` then generates
    only that answer, after the recorded turns."""
    max_skipped: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Maximum fraction of records that cannot be used: without an answer, with an unknown role, or refused by the chat
    template. Above it, training does not start."""

    def template(self, rendering: ChatTemplate) -> ChatTemplate:
        """Return the chat template of the conversations. UserError if there is none."""
        template = rendering
        if self.chat_template is not None:
            template = replace(rendering, text=read_given(Path(self.chat_template), "a Jinja chat template"))
        template.check(self.path)
        return template

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        return {"kind": self.kind, "answers": self.answers, **self.template(rendering).key()}

    def documents(self, rendering: ChatTemplate, records: Iterable[Record]) -> Iterator[Document]:
        """Yield the documents of every conversation with an answer, rendered by the chat template. A record without
        one is a document without tokens, with the reason."""
        template = self.template(rendering)
        read: list[Conversation | RecordError] = []
        for record in records:
            try:
                messages, tools = read_messages(record), read_tools(record)
                last_only = self.answers == "last"
                read.append(read_conversation(template, messages, place=record[0], tools=tools, last_only=last_only))
            except RecordError as error:
                read.append(error)
        encoded = encode_conversations(template, [found for found in read if isinstance(found, Conversation)])
        for conversation in read:
            if isinstance(conversation, RecordError):
                yield left_out(conversation, self.path)
                continue
            labelled = [document for document in next(encoded) if document.labels.any()]
            for document in labelled[:-1]:
                yield replace(document, ends_record=False)
            if labelled:
                yield replace(labelled[-1], notes="\n".join(conversation.notes))
            else:
                what = f"{conversation.place}: expected an answer of the assistant, got an empty one"
                yield left_out(RecordError(what, "without an answer"), self.path)

    def dialogues(
        self, rendering: ChatTemplate, most: int, wanted: int | None, seed: int, *, recorded: bool = False
    ) -> Iterator[Dialogue | RecordError]:
        """Yield the first `wanted` conversations (None: all) whose first prompt has at most `most` tokens, and the
        errors of the records that are left out. `recorded`: only the last turn of the assistant is to be answered, even
        if it calls tools."""
        template, last_only = self.template(rendering), self.answers == "last"
        how: dict[str, Any] = {"most": most, "last_only": last_only or recorded, "calls": recorded}
        found = 0
        for record in self.records():
            if found == wanted:
                return
            try:
                messages, tools = read_messages(record), read_tools(record)
                dialogue = Dialogue(answer_by_answer(template, messages, place=record[0], tools=tools, **how))
            except RecordError as error:
                yield error
                continue
            if dialogue.prompt is None:
                yield RecordError("", TOO_LONG)
            else:
                found += 1
                yield dialogue


AnySource = Annotated[PythonSource | TextSource | ChatSource, Field(discriminator="kind")]


def left_out(error: RecordError, name: str) -> Document:
    return Document.of([], [], reason=error.reason, error=str(error).removeprefix(name))


def report_skipped(source: AnySource, tally: Tally, say: Callable[[str], None] | None, *, whole: bool) -> None:
    """Report the number of a source's records that are left out, by reason. `say`: None to report only an error.
    `whole`: all records have been read; UserError if more are unusable than the source allows."""
    if not tally.skipped or not isinstance(source, ChatSource):
        return
    named = sorted(tally.skipped.items(), key=lambda pair: -pair[1])
    reasons = ", ".join(f"{count} {reason}" for reason, count in named[:MOST_REASONS])
    rest, skipped = sum(count for _, count in named[MOST_REASONS:]), sum(tally.skipped.values())
    line = (
        f"{source}: {skipped} of {tally.records} records are left out: {reasons}{f', {rest} others' if rest else ''}; "
        f"the first is {source}{tally.first_skipped}"
    )
    if whole and skipped > source.max_skipped * tally.records:
        raise UserError(f"{line}; mend them, or allow more than max_skipped={source.max_skipped:g} of this source")
    if say is not None:
        say(line)


def read_source(source: AnySource, name: str, reader: Reader) -> Corpus:
    """Return the documents of a source, and report skipped records and rewritten turns. `name`: the source's key in the
    recipe. UserError if there is nothing to train on."""
    corpus = reader.read(str(source), lambda: _tokenised(source, reader.rendering))
    report_skipped(source, corpus.tally, reader.say, whole=True)
    for note, count in corpus.tally.notes.items():
        reader.say(f"{source}: {count:,} {note}")
    if corpus.num_labels == 0:
        raise UserError(f"{source}: no token to train on in its {len(corpus)} texts; give longer ones")
    if corpus.tally.last_tokens < corpus.num_tokens:
        factor = corpus.num_tokens / corpus.tally.last_tokens
        reader.say(
            f"{name}: the chat template rewrites earlier turns, so answers are documents of their own: {factor:.2f} "
            f"times the conversations' tokens; {name}.answers=last trains on their last answers alone"
        )
    return corpus


def _tokenised(source: AnySource, rendering: ChatTemplate) -> Corpus:
    """Return the documents of a source, tokenised by several processes if it is large."""
    content = source.content()
    records = _records(source, fingerprint(content))
    processes = min(len(os.sched_getaffinity(0)), len(records) // RECORDS_PER_PROCESS)
    documents = records.map(
        partial(_tokenise, source, rendering, os.getpid()),
        batched=True,
        batch_size=BATCH,
        remove_columns=records.column_names,
        features=document_features(),
        num_proc=processes if processes > 1 else None,
        new_fingerprint=fingerprint({"records": content, **tokens_key(source, rendering)}),
        load_from_cache_file=True,
    )
    return corpus_in(documents)


def tokens_key(source: AnySource, rendering: ChatTemplate) -> dict[str, Any]:
    return {"tokenizer": tokenizer_key(rendering.tokenizer), **source.key(rendering)}


def _records(source: AnySource, name: str) -> "Dataset":
    """Return a source's records as a data set of JSON texts: their own fields may be of a type for each record."""
    from datasets import Features, Value

    def rows() -> Iterator[dict[str, Any]]:
        place = None
        for place, record in source.records():
            yield {"place": place.removeprefix(str(source)), "record": json.dumps(record, default=str)}
        if place is None:
            raise UserError(f"{source}: holds no records; expected some text or conversations")

    return stored(name, Features({"place": Value("string"), "record": Value("large_string")}), rows)


def _tokenise(
    source: AnySource, rendering: ChatTemplate, process: int, batch: dict[str, list[str]]
) -> dict[str, list[Any]]:
    if os.getpid() != process:  # one of several, which leaves signals to the run
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    places = (f"{source}{place}" for place in batch["place"])  # the file may have moved
    records = zip(places, map(json.loads, batch["record"]), strict=True)
    return columns(source.documents(rendering, records))
