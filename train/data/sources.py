"""The recipe's data sources. Each kind reads its records as documents, and as prompts for the target to answer."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from eval.data.answer_frame import REASONING_END
from eval.data.chat_template import ChatTemplate
from eval.data.conversation_forms import NO_CONVERSATION, Chat, read_chat
from eval.data.data_files import Record, RecordError, content_hash, describe_unread, read_records, read_text
from eval.data.python_source import read_split
from heads.core.errors import UserError
from heads.core.files import read_given
from heads.core.strict_settings import Count, Place, Settings
from train.core.strict_yaml import Amount, Name, NamedPlace
from train.data.chats import (
    Rendered,
    encode_conversations,
    encode_texts,
    read_conversation,
    read_rendered,
    trained_answers,
)
from train.data.corpus import HELD_OUT, TOO_LONG, Document
from train.data.dialogues import ChatDialogue, Dialogue, RenderedDialogue, first_turns, read_asked
from train.data.recorded_ids import COLUMNS, check_spelling, check_weights, form_of, read_ids

MIN_PROMPT_CHARACTERS = 40


class Texts(ABC):
    """The common base of sources of plain text."""

    kind: str

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yield each record, in order."""

    def documents(self, rendering: ChatTemplate, records: Sequence[Record]) -> Iterator[list[Document]]:
        documents = encode_texts(rendering, [read_text(record) for record in records if not form_of(record[1])])
        for record in records:
            if form_of(record[1]):
                yield _recorded_text(rendering, record, str(self))
                continue
            fields = record[1]
            *before, last = next(documents)
            unread = (key for key, value in fields.items() if key != "text" and value and isinstance(value, str))
            yield [*before, replace(last, form="text", unread="\n".join(unread))]

    def key(self, rendering: ChatTemplate) -> dict[str, object]:
        """Return the plain values on which the documents depend, apart from the records and the tokenizer."""
        return {"kind": self.kind, **rendering.key()}

    def dialogues(
        self, rendering: ChatTemplate, max_tokens: int, count: int | None, seed: int, *, recorded: bool = False
    ) -> Iterator[Dialogue | RecordError]:
        """Yield `count` single prompts of `max_tokens` / 4 to `max_tokens` tokens, cut from texts, or one of each text.
        A prompt begins at the start of a text, or at a line start after a random point in its first three quarters."""
        tokenizer = rendering.tokenizer
        random = np.random.default_rng((seed, 3))
        for place, text in islice(self._texts_to_cut(rendering, count), count):
            if rendering.has_rendered(text):
                dialogue = RenderedDialogue(rendering, read_rendered(rendering, text), max_tokens)
                yield dialogue if dialogue.prompt is not None else RecordError("", TOO_LONG)
                continue
            length = int(random.integers(max(1, max_tokens // 4), max_tokens + 1))
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
                yield Dialogue(rendering, ids)
            except RecordError as error:
                yield error

    def _texts_to_cut(self, rendering: ChatTemplate, count: int | None) -> Iterator[tuple[str, str]]:
        """Yield those of the first `count` texts that are long enough for prompts, or rendered, each after its place,
        again and again; None: all, once."""
        while True:
            has_texts = False
            for record in islice(self.records(), count):
                if len(text := read_text(record)) >= MIN_PROMPT_CHARACTERS or rendering.has_rendered(text):
                    has_texts = True
                    yield record[0], text
            if not has_texts:
                raise UserError(f"{self}: no text has {MIN_PROMPT_CHARACTERS} characters, so none gives a prompt")
            if count is None:
                return


class PythonSource(Settings, Texts):
    """Modules of Python's standard library. No download is needed. Some modules are held out for evaluation."""

    kind: Literal["python"]
    """The kind of source."""
    limit: Count | None = None
    """Maximum number of modules to read. Null: all."""
    weight: Amount | None = None
    """Share of the training rows and prompts, relative to the other sources. Give every source a weight, or none.
    Without weights, rows are in proportion to the size of each source, and prompts are split evenly."""

    def __str__(self) -> str:
        return "installed Python source"

    def records(self) -> Iterator[Record]:
        for place, text in islice(read_split(held_out=False), self.limit):
            yield place, {"text": text}

    def unread(self) -> list[str]:
        return []

    def content(self) -> dict[str, object]:
        content = hashlib.sha256()
        for record in self.records():
            content.update(hashlib.sha256(read_text(record).encode()).digest())
        return {"content": content.hexdigest()}


class RecordSource(Settings):
    """Records of a .jsonl, .json, .parquet or .txt file, of a .gz file of JSON, of several such files, or of a data
    set."""

    path: NamedPlace
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
    weight: Amount | None = None
    """Share of the training rows and prompts, relative to the other sources. Give every source a weight, or none.
    Without weights, rows are in proportion to the size of each source, and prompts are split evenly."""

    def __str__(self) -> str:
        return self.path

    def records(self) -> Iterator[Record]:
        return read_records(self.path, subset=self.subset, split=self.split, limit=self.limit)

    def content(self) -> dict[str, object]:
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
    chat_template: Place | None = None
    """File with a Jinja chat template that replaces the tokenizer's template."""
    answers: Literal["all", "last"] = "all"
    """`last` trains only on the last answer of each conversation that has not weight 0. This saves tokens if the chat
    template rewrites earlier turns, since each answer then needs its own document. `data.regenerate` then generates
    only that answer, after the recorded turns."""
    max_skipped: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Maximum fraction of records that cannot be used: without an answer, with an unknown role, or refused by the chat
    template. Above it, training does not start."""
    held_out: NamedPlace | None = None
    """File of conversations that are not trained on, such as that of `eval.prompts`: records that begin with the turns
    before one of its first answers are skipped. Null: none."""

    @cached_property
    def _held_out_turns(self) -> set[tuple[str, ...] | None]:
        """The first turns of the conversations that are held out."""
        return set() if self.held_out is None else {*map(first_turns, read_records(self.held_out))} - {None}

    def holds_out(self, record: Record) -> bool:
        return self._held_out_turns != set() and first_turns(record) in self._held_out_turns

    def content(self) -> dict[str, object]:
        held_out = {} if self.held_out is None else {"held_out": content_hash(self.held_out)}
        return super().content() | held_out

    def template(self, rendering: ChatTemplate) -> ChatTemplate:
        """Return the chat template of the conversations. UserError if there is none."""
        template = rendering
        if self.chat_template is not None:
            text = read_given(Path(self.chat_template), "a Jinja chat template")
            template = replace(rendering, text=text, file=self.chat_template)
        template.check(self.path)
        return template

    def key(self, rendering: ChatTemplate) -> dict[str, object]:
        return {"kind": self.kind, "answers": self.answers, **self.template(rendering).key()}

    def documents(self, rendering: ChatTemplate, records: Sequence[Record]) -> Iterator[list[Document]]:
        """Yield the documents of each conversation, rendered by the chat template. One without an answer is a document
        without tokens, with the reason."""
        template = self.template(rendering)
        last_only = self.answers == "last"
        texts: list[list[Rendered]] = []
        read: list[dict[str, Any] | list[Document] | RecordError] = []
        for record in records:
            if self.holds_out(record):
                read.append(RecordError("", HELD_OUT))
                continue
            try:
                if form_of(record[1]):
                    read.append(_recorded_chat(template, record, last_only))
                    continue
                own, chat = with_arguments(template, read_chat(record))
                rendered, notes = read_conversation(
                    own, chat.messages, place=record[0], tools=chat.tools, last_only=last_only
                )
                texts.append(rendered)
                read.append(record_fields(chat, notes))
            except RecordError as error:
                read.append(error)
        encoded = encode_conversations(template, texts)
        for (place, _), fields in zip(records, read, strict=True):
            if isinstance(fields, RecordError):
                yield [skipped_document(fields, self.path)]
            elif isinstance(fields, list):
                yield fields
            elif labelled := [document for document in next(encoded) if document.labels.any()]:
                yield [*labelled[:-1], replace(labelled[-1], **fields)]
            else:
                what = f"{place}: expected an answer of the assistant, got an empty one"
                yield [skipped_document(RecordError(what, "without an answer"), self.path)]

    def dialogues(
        self, rendering: ChatTemplate, max_tokens: int, count: int | None, seed: int, *, recorded: bool = False
    ) -> Iterator[Dialogue | RecordError]:
        """Yield the first `count` conversations (None: all) whose first prompt has at most `max_tokens` tokens, and the
        errors of the records that are skipped. `recorded`: only the last turn of the assistant is to be answered, even
        if it calls tools."""
        template = self.template(rendering)
        num_found = 0
        for record in self.records():
            if num_found == count:
                return
            dialogue = self.dialogue(template, record, max_tokens, recorded=recorded)
            num_found += isinstance(dialogue, Dialogue)
            yield dialogue

    def dialogue(
        self, template: ChatTemplate, record: Record, max_tokens: int, *, recorded: bool = False
    ) -> Dialogue | RecordError:
        """Return the prompts of one record, or why there are none."""
        last_only = recorded or self.answers == "last"
        if self.holds_out(record):
            return RecordError("", HELD_OUT)
        try:
            own, chat = with_arguments(template, read_asked(record))
            dialogue = ChatDialogue(own, chat, record[0], max_tokens, last_only=last_only, calls=recorded)
        except RecordError as error:
            return error
        dialogue.about = record_fields(chat)
        return RecordError("", TOO_LONG) if dialogue.prompt is None else dialogue


def _recorded_text(rendering: ChatTemplate, record: Record, name: str) -> list[Document]:
    """Return the documents of a text with token ids, or the reason why it is skipped."""
    place, fields = record
    try:
        *before, last = read_ids(record, rendering.num_tokens)
        check_spelling(place, rendering.tokenizer, [part.ids for part in (*before, last)], [read_text(record)])
    except RecordError as error:
        return [skipped_document(error, name)]
    return [*before, replace(last, form=" with ".join(form_of(fields)))]


def _recorded_chat(template: ChatTemplate, record: Record, last_only: bool) -> list[Document]:
    """Return the documents of a record with token ids, which need no conversation beside them. RecordError as from
    `read_ids` and `check_spelling`, and for a conversation that cannot be read."""
    place, fields = record
    *before, last = read_ids(record, template.num_tokens, last_only=last_only)
    columns = form_of(fields)
    chat = Chat([], None, "", ())
    try:
        chat = read_chat((place, {key: value for key, value in fields.items() if key not in COLUMNS}))
        answers = trained_answers(chat.messages, place)
        check_weights(place, [*before, last], chat.messages, len(answers))
        answers = answers[-1 if last_only else 0 :]
    except RecordError as error:
        if error.reason != NO_CONVERSATION:
            raise
        answers = []
    texts = (chat.messages[number]["content"].rpartition(REASONING_END)[2] for number in answers)
    check_spelling(place, template.tokenizer, [part.ids[part.labels] for part in (*before, last)], texts)
    return [*before, replace(last, **record_fields(chat._replace(form=" with ".join(columns))))]


AnySource = Annotated[PythonSource | TextSource | ChatSource, Field(discriminator="kind")]


def with_arguments(template: ChatTemplate, chat: Chat) -> tuple[ChatTemplate, Chat]:
    """Return the template with the arguments of a record, and the record with a note on those that it does not read."""
    own, unread = template.with_arguments(chat.arguments)
    notes = (f"records have an argument {name!r} that the chat template does not read" for name in unread)
    return own, chat._replace(notes=(*chat.notes, *notes))


def record_fields(chat: Chat, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the last document of a record says of it. `notes`: those on its answers."""
    return {"form": chat.form, "unread": "\n".join(chat.unread), "notes": "\n".join([*chat.notes, *notes])}


def skipped_document(error: RecordError, name: str) -> Document:
    return Document.of([], [], reason=error.reason, error=str(error).removeprefix(name))
