"""The recipe's data sources. Each kind reads its records as documents, and as prompts for the target to answer."""

import hashlib
import json
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from eval.measure.forms import NO_CONVERSATION, Chat, read_arguments, read_chat
from eval.measure.prompts import to_prompt
from eval.measure.python_source import read_split
from eval.measure.records import Message, Record, RecordError, content_hash, describe_unread, read_records, read_text
from heads.core.errors import UserError
from heads.core.files import read_given
from train.core.strict_yaml import Count, Name, Settings, Weight
from train.data.chats import (
    Conversation,
    Dialogue,
    answer_by_answer,
    answer_rendered,
    encode_conversations,
    encode_text,
    lone,
    read_conversation,
    read_rendered,
)
from train.data.corpus import (
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
from train.data.screen import screen
from train.data.templates import ChatTemplate, tokenizer_key

if TYPE_CHECKING:
    from datasets import Dataset

MIN_PROMPT_CHARACTERS = 40
MOST_REASONS = 5
"""Number of reasons to list for records left out, the most common first."""
BATCH = 64
"""Records tokenised together."""
ASKED: Message = {"role": "assistant", "content": ""}
"""Turn that the target is to write."""
RECORDS_PER_PROCESS = 8192
"""Minimum number of records for each process that tokenises."""


class Texts(ABC):
    """The common base of sources of plain text."""

    kind: str

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yield each record, in order."""

    def documents(self, rendering: ChatTemplate, records: Iterable[Record]) -> Iterator[Document]:
        records = list(records)
        documents = encode_text(rendering, [read_text(record) for record in records])
        for document, (_, fields) in zip(documents, records, strict=True):
            unread = "\n".join(
                key for key, value in fields.items() if key != "text" and value and isinstance(value, str)
            )
            yield replace(document, form="text", unread=unread)

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        """Return the plain values on which the documents depend, apart from the records and the tokenizer."""
        return {"kind": self.kind, **rendering.key()}

    def dialogues(
        self, rendering: ChatTemplate, most: int, wanted: int | None, seed: int, *, recorded: bool = False
    ) -> Iterator[Dialogue | RecordError]:
        """Yield `wanted` single prompts of `most` / 4 to `most` tokens, cut from texts, or one of each text. A prompt
        begins at the start of a text, or at a line start after a random point in its first three quarters."""
        tokenizer, random = rendering.tokenizer, np.random.default_rng((seed, 3))
        for place, text in islice(self._over_and_over(rendering, wanted), wanted):
            if rendering.has_rendered(text):
                dialogue = Dialogue(answer_rendered(rendering, read_rendered(rendering, text), most))
                yield dialogue if dialogue.prompt is not None else RecordError("", TOO_LONG)
                continue
            length = int(random.integers(max(1, most // 4), most + 1))
            # A quarter of the prompts begin at the start of a document, the other ones at a line inside it.
            inside = random.random() >= 0.25
            start = text.find("\n", int(random.integers(0, len(text) * 3 // 4 + 1))) + 1 if inside else 0
            # No tokenizer averages more than 16 characters of real text per token.
            window = text[start : start + 16 * length]
            ids = tokenizer(window, return_attention_mask=False, verbose=False)["input_ids"]
            if ids[-1:] == [tokenizer.eos_token_id]:
                ids = ids[:-1]
            ids = ids[:length] or tokenizer(text, verbose=False)["input_ids"][:length]
            try:
                rendering.check_ids(ids, place)
                yield Dialogue(lone(ids))
            except RecordError as error:
                yield error

    def _over_and_over(self, rendering: ChatTemplate, most: int | None) -> Iterator[tuple[str, str]]:
        """Yield those of the first `most` texts that are long enough for prompts, or rendered, each after its place,
        over and over; None: all, once."""
        while True:
            found = False
            for record in islice(self.records(), most):
                if len(text := read_text(record)) >= MIN_PROMPT_CHARACTERS or rendering.has_rendered(text):
                    found = True
                    yield record[0], text
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

    def unread(self) -> list[str]:
        return []

    def content(self) -> dict[str, Any]:
        content = hashlib.sha256()
        for record in self.records():
            content.update(hashlib.sha256(read_text(record).encode()).digest())
        return {"content": content.hexdigest()}


class RecordSource(Settings):
    """Records of a .jsonl, .json, .parquet or .txt file, of a .gz file of JSON, of several such files, or of a data
    set."""

    path: Name
    """A file, a folder of files, a pattern such as `part-*.jsonl`, a folder that `datasets` saved to disk, or the Hub
    id of a data set. Several files are read in the order of their names."""
    subset: Name | None = None
    """Subset (configuration) of a data set that has several. A file has none."""
    split: str = "train"
    """Split of a data set. Files of a folder or of a pattern belong to splits by their names and by those of their
    folders, as `datasets.load_dataset` reads them: `test.jsonl` and `data/test-00000-of-00001.parquet` are not of
    `train`. A file has none."""
    limit: Count | None = None
    """Maximum number of records to read. Null: all."""
    weight: Weight = None
    """Share of the training rows and prompts, relative to the other sources. Give every source a weight, or none.
    Without weights, rows are in proportion to the size of each source, and prompts are split evenly."""

    def __str__(self) -> str:
        return self.path

    def records(self) -> Iterator[Record]:
        return read_records(self.path, subset=self.subset, split=self.split, limit=self.limit)

    def content(self) -> dict[str, Any]:
        return {"content": content_hash(self.path, subset=self.subset, split=self.split), "limit": self.limit}

    def unread(self) -> list[str]:
        """Return the line on the files in the source's place that are not read, if there are some."""
        return describe_unread(self.path, subset=self.subset, split=self.split)


class TextSource(RecordSource, Texts):
    """Plain text: records with a `text` field, or a .txt file. Every token is a label, and in conversations that the
    target's chat template has rendered, those of the answers."""

    kind: Literal["text"]
    """The form of the source."""


class ChatSource(RecordSource):
    """Conversations: records with turns (`messages`, `conversations`) or with a question and its answer. The labels are
    the tokens of the assistant's answers."""

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
    held_out: Name | None = None
    """File of conversations that are not trained on, such as that of `eval.prompts`: records that begin with the turns
    before one of its first answers are left out. Null: none."""

    def records(self) -> Iterator[Record]:
        if self.held_out is None:
            return super().records()
        held = {opening(record) for record in read_records(self.held_out)} - {None}
        return (record for record in super().records() if opening(record) not in held)

    def content(self) -> dict[str, Any]:
        held = {} if self.held_out is None else {"held_out": content_hash(self.held_out)}
        return super().content() | held

    def template(self, rendering: ChatTemplate) -> ChatTemplate:
        """Return the chat template of the conversations. UserError if there is none."""
        template = rendering
        if self.chat_template is not None:
            text = read_given(Path(self.chat_template), "a Jinja chat template")
            template = replace(rendering, text=text, file=self.chat_template)
        template.check(self.path)
        return template

    def key(self, rendering: ChatTemplate) -> dict[str, Any]:
        return {"kind": self.kind, "answers": self.answers, **self.template(rendering).key()}

    def documents(self, rendering: ChatTemplate, records: Iterable[Record]) -> Iterator[Document]:
        """Yield the documents of every conversation with an answer, rendered by the chat template. A record without
        one is a document without tokens, with the reason."""
        template = self.template(rendering)
        read: list[tuple[Conversation, Chat] | RecordError] = []
        for record in records:
            try:
                chat = read_chat(record)
                own, notes = with_arguments(template, chat)
                how: dict[str, Any] = {"place": record[0], "tools": chat.tools, "last_only": self.answers == "last"}
                read.append((read_conversation(own, chat.messages, **how), chat._replace(notes=notes)))
            except RecordError as error:
                read.append(error)
        encoded = encode_conversations(template, [pair[0] for pair in read if not isinstance(pair, RecordError)])
        for pair in read:
            if isinstance(pair, RecordError):
                yield left_out(pair, self.path)
                continue
            conversation, chat = pair
            labelled = [document for document in next(encoded) if document.labels.any()]
            yield from (replace(document, ends_record=False) for document in labelled[:-1])
            if labelled:
                yield replace(labelled[-1], **about(chat, conversation.notes))
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
            dialogue = self.dialogue(template, record, **how)
            found += isinstance(dialogue, Dialogue)
            yield dialogue

    def dialogue(self, template: ChatTemplate, record: Record, **how: Any) -> Dialogue | RecordError:
        """Return the prompts of one record, or why there are none. `how`: arguments of `answer_by_answer`."""
        try:
            chat = read_asked(record)
            own, notes = with_arguments(template, chat)
            prompts = answer_by_answer(own, chat.messages, place=record[0], tools=chat.tools, **how)
            dialogue = Dialogue(prompts, about(chat._replace(notes=notes)))
        except RecordError as error:
            return error
        return RecordError("", TOO_LONG) if dialogue.prompt is None else dialogue


def read_asked(record: Record) -> Chat:
    """Return the conversation of a record for the target to answer, whose answers are empty if the record has only
    prompts, as prompt files have them. RecordError as from `read_chat`."""
    try:
        chat = read_chat(record)
    except RecordError as error:
        if error.reason != NO_CONVERSATION or "text" in record[1]:
            raise
        try:
            prompt = to_prompt(record, "", None)
        except UserError:
            raise error from None
        turns = [prompt.messages, *([{"role": "user", "content": text}] for text in prompt.later_turns)]
        answered = [message for asked in turns for message in (*asked, ASKED)]
        return Chat(answered, None, "prompts", (), arguments=read_arguments(record))
    if any(message["role"] == "assistant" for message in chat.messages):
        return chat
    return chat._replace(messages=[*chat.messages, ASKED])


def opening(record: Record) -> tuple[str, ...] | None:
    """Return the roles and texts of the turns before a record's first answer, or None if it has no conversation."""
    try:
        messages = read_asked(record).messages
    except RecordError:
        return None
    asked = takewhile(lambda message: message["role"] != "assistant", messages)
    return tuple(text for message in asked for text in (message["role"], message["content"]))


AnySource = Annotated[PythonSource | TextSource | ChatSource, Field(discriminator="kind")]


def with_arguments(template: ChatTemplate, chat: Chat) -> tuple[ChatTemplate, tuple[str, ...]]:
    """Return the template with the arguments of a record, and the notes on the record."""
    own, unread = template.with_arguments(chat.arguments)
    return own, (
        *chat.notes,
        *(f"records have an argument {name!r} that the chat template does not read" for name in unread),
    )


def about(chat: Chat, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the last document of a record says of it. `notes`: those on its answers."""
    return {"form": chat.form, "unread": "\n".join(chat.unread), "notes": "\n".join([*chat.notes, *notes])}


def left_out(error: RecordError, name: str) -> Document:
    return Document.of([], [], reason=error.reason, error=str(error).removeprefix(name))


def describe_skipped(source: AnySource, tally: Tally, *, whole: bool) -> list[str]:
    """Return the line on a source's records that are left out, by reason, if there are some. `whole`: all records have
    been read; UserError if more are unusable than the source allows."""
    if not tally.skipped:
        return []
    named = sorted(tally.skipped.items(), key=lambda pair: -pair[1])
    reasons = ", ".join(f"{count} {reason}" for reason, count in named[:MOST_REASONS])
    rest, skipped = sum(count for _, count in named[MOST_REASONS:]), sum(tally.skipped.values())
    line = (
        f"{skipped} of {tally.records} records are left out: {reasons}{f', {rest} others' if rest else ''}; "
        f"the first is {source}{tally.first_skipped}"
    )
    if whole and isinstance(source, ChatSource) and skipped > source.max_skipped * tally.records:
        most = f"more than max_skipped={source.max_skipped:g} of this source"
        raise UserError(f"{source}: {line}; mend them, or allow {most}")
    return [line]


def read_source(source: AnySource, name: str, reader: Reader) -> Corpus:
    """Return the documents of a source, and print what they are. `name`: the source's key in the recipe. UserError if
    there is nothing to train on."""
    corpus = reader.read(str(source), lambda: _tokenised(source, reader.rendering))
    tally = corpus.tally
    lines = [*source.unread(), *describe_skipped(source, tally, whole=True)]
    if corpus.num_labels == 0:
        remedy = lines[0] if lines else "give longer ones"
        raise UserError(f"{source}: no token to train on in its {len(corpus)} texts; {remedy}")
    if tally.last_tokens < corpus.num_tokens:
        lines.append(
            "the chat template rewrites earlier turns, so answers are documents of their own: "
            f"{corpus.num_tokens / tally.last_tokens:.2f} times the conversations' tokens; {name}.answers=last trains "
            "on their last answers alone"
        )
    sizes = (
        f"{tally.records:,} records: {tally.records - sum(tally.skipped.values()):,} {texts_of(source)}, "
        f"{corpus.num_tokens:,} tokens, {corpus.num_labels:,} labels"
    )
    reader.say(screen(f"{name}: {source}", sizes, corpus, reader.rendering.tokenizer, *lines))
    return corpus


def texts_of(source: AnySource) -> str:
    return "conversations" if source.kind == "chat" else "texts"


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
    limit = {} if rendering.limit is None else {"vocab_size": rendering.limit}
    return {"tokenizer": tokenizer_key(rendering.tokenizer), **limit, **source.key(rendering)}


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
    places = [f"{source}{place}" for place in batch["place"]]  # the file may have moved
    records = zip(places, map(json.loads, batch["record"]), strict=True)
    return columns(_known(source.documents(rendering, records), places, source, rendering))


def _known(
    documents: Iterable[Document], places: Iterable[str], source: AnySource, rendering: ChatTemplate
) -> Iterator[Document]:
    """Yield the documents of each record, at these places, or leave it out if it has a token that the target does not
    have."""
    remaining, held = iter(places), list[Document]()
    for document in documents:
        held.append(document)
        if document.ends_record:
            try:
                rendering.check_ids(np.concatenate([each.ids for each in held]), next(remaining))
                yield from held
            except RecordError as error:
                yield left_out(error, str(source))
            held = []
