"""The recipe's sources: what each kind reads, as documents and as prompts for the target to answer."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from eval.benchmark.python_source import read_split
from eval.benchmark.records import Message, RecordError, read_messages, read_records, read_text, read_tools
from eval.files import is_file, read_given
from heads.errors import UserError
from train.data.chats import check_template, encode_chat, encode_prompt, encode_text
from train.data.packing import Document
from train.strict_yaml import Count, Name, Settings, Weight

Say = Callable[[str], None]
T = TypeVar("T")
MIN_PROMPT_CHARACTERS = 40
MOST_REASONS = 5
"""Named of the reasons for leaving records out, the commonest first."""


class Texts:
    """The part that sources of plain text have in common."""

    def texts(self) -> Iterator[str]:
        """Each text, in order."""
        raise NotImplementedError

    def documents(self, tokenizer: PreTrainedTokenizerBase, say: Say) -> list[Document]:
        """Every text as a document."""
        return list(encode_text(tokenizer, list(self.texts())))

    def prompts(
        self, tokenizer: PreTrainedTokenizerBase, most: int, wanted: int, seed: int, say: Say
    ) -> list[list[int]]:
        """Openings at line starts in the first three quarters of texts, `most` / 4 to `most` tokens long."""
        texts = [text for text in islice(self.texts(), wanted) if len(text) >= MIN_PROMPT_CHARACTERS]
        if not texts:
            return []
        random = np.random.default_rng((seed, 3))
        prompts: list[list[int]] = []
        for n in range(wanted):
            text = texts[n % len(texts)]
            length = int(random.integers(max(1, most // 4), most + 1))
            # A quarter of the prompts open a document; the others begin at a line somewhere inside it.
            inside = random.random() >= 0.25
            start = text.find("\n", int(random.integers(0, len(text) * 3 // 4 + 1))) + 1 if inside else 0
            # No tokenizer packs more than 16 characters of real text in a token, on average.
            window = text[start : start + 16 * length]
            ids = tokenizer(window, return_attention_mask=False, verbose=False)["input_ids"]
            if ids[-1:] == [tokenizer.eos_token_id]:
                ids = ids[:-1]
            prompts.append(ids[:length] or tokenizer(text, verbose=False)["input_ids"][:length])
        return prompts


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


class TextSource(Texts, RecordSource):
    """Plain text: records with a `text` field, or a .txt file. Every token is a label."""

    kind: Literal["text"]
    """The form of the source."""

    def texts(self) -> Iterator[str]:
        return (read_text(record) for record in read_records(self.path, split=self.split, limit=self.limit))


class ChatSource(RecordSource):
    """Conversations: records with `messages`, `conversations`, or `instruction` and `response`. The labels are the
    tokens of the assistant's answers."""

    kind: Literal["chat"]
    """The form of the source."""
    chat_template: str | None = None
    """File with a Jinja chat template, used in place of the tokenizer's own."""
    max_skipped: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Largest share of records to leave out because they cannot be used: no answer, an unknown role, refused by the
    chat template. Above it, training does not begin."""

    def documents(self, tokenizer: PreTrainedTokenizerBase, say: Say) -> list[Document]:
        """Every conversation with an answer, as the documents that the chat template makes of it."""
        conversations = Conversations(self, tokenizer)
        documents = [document for found in conversations.read(_answers) for document in found]
        conversations.check()
        conversations.report(say)
        return documents

    def prompts(
        self, tokenizer: PreTrainedTokenizerBase, most: int, wanted: int, seed: int, say: Say
    ) -> list[list[int]]:
        """The first conversations up to their last answers that are no longer than `most` tokens."""
        conversations = Conversations(self, tokenizer)
        short = (prompt for prompt in conversations.read(encode_prompt) if prompt and len(prompt) <= most)
        found = list(islice(short, wanted))
        if len(found) < wanted:  # the whole source is read
            conversations.check()
        conversations.report(say)
        return found


AnySource = Annotated[PythonSource | TextSource | ChatSource, Field(discriminator="kind")]


class Conversations:
    """The records of a chat source; those that cannot be used are counted by reason and left out."""

    def __init__(self, source: ChatSource, tokenizer: PreTrainedTokenizerBase) -> None:
        self.source, self.tokenizer = source, tokenizer
        self.template: str | None = None
        if source.chat_template is None:
            check_template(tokenizer, source.path)
        else:
            self.template = read_given(Path(source.chat_template), "a Jinja chat template")
        self.total = 0
        self.left_out: Counter[str] = Counter()
        """Records by the reason why."""
        self.first: RecordError | None = None

    def read(self, encode: Callable[..., T]) -> Iterator[T]:
        """Each usable record, encoded by `encode`, which is called as `encode_chat` is."""
        for record in read_records(self.source.path, split=self.source.split, limit=self.source.limit):
            self.total += 1
            try:
                messages, tools = read_messages(record), read_tools(record)
                found = encode(self.tokenizer, messages, place=record[0], chat_template=self.template, tools=tools)
            except RecordError as error:
                self.left_out[error.reason] += 1
                self.first = self.first or error
            else:
                yield found

    def report(self, say: Say) -> None:
        """Say how many of the records read so far cannot be used, if any."""
        if self.first is not None:
            say(self._summary())

    def check(self) -> None:
        """UserError where more cannot be used than the source allows."""
        most = self.source.max_skipped
        if self.left_out.total() > most * self.total:
            raise UserError(f"{self._summary()}; mend them, or allow more than max_skipped={most:g} of this source")

    def _summary(self) -> str:
        named = self.left_out.most_common(MOST_REASONS)
        reasons = ", ".join(f"{count} {reason}" for reason, count in named)
        rest = self.left_out.total() - sum(count for _, count in named)
        more = f", {rest} others" if rest else ""
        return (
            f"{self.source.path}: {self.left_out.total()} of {self.total} records are left out: {reasons}{more}; "
            f"the first is {self.first}"
        )


def _answers(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> list[Document]:
    """The documents of a conversation that have labels. RecordError if none has."""
    found = [document for document in encode_chat(tokenizer, messages, **options) if document.labels.any()]
    if not found:
        raise RecordError(f"{options['place']}: expected an answer of the assistant, got none", "without an answer")
    return found
