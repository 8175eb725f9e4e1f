"""The recipe's sources as documents, and as prompts for the target to answer."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from eval.benchmark.corpus import read_split
from eval.benchmark.records import Message, RecordError, read_messages, read_records, read_text, read_tools
from eval.files import read_given
from heads.errors import UserError
from train.data.chats import check_template, encode_chat, encode_prompt, encode_text
from train.data.packing import Document, shares
from train.recipe import Answers, AnySource, ChatSource, Data, PythonSource

Say = Callable[[str], None]
T = TypeVar("T")
MIN_PROMPT_CHARACTERS = 40
MOST_REASONS = 5
"""Named of the reasons for leaving records out, the commonest first."""


def silent(_: str) -> None:
    """Say nothing."""


def read_documents(source: AnySource, tokenizer: PreTrainedTokenizerBase, say: Say) -> list[Document]:
    """Every document of a source. UserError if none of its tokens is a label."""
    if isinstance(source, ChatSource):
        conversations = Conversations(source, tokenizer)
        documents = [document for found in conversations.read(_answers) for document in found]
        conversations.check()
        conversations.report(say)
    else:
        documents = list(encode_text(tokenizer, list(read_texts(source))))
    if not any(document.labels.any() for document in documents):
        raise UserError(f"{source_name(source)}: no token to train on in its {len(documents)} texts; give longer ones")
    return documents


class Conversations:
    """The records of a chat source; those that cannot be used are counted by reason and left out."""

    def __init__(self, source: ChatSource, tokenizer: PreTrainedTokenizerBase) -> None:
        self.source, self.tokenizer = source, tokenizer
        self.template = read_template(source, tokenizer)
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
                found = encode(self.tokenizer, messages, place=record[0], template=self.template, tools=tools)
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
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out.most_common(MOST_REASONS))
        rest = self.left_out.total() - sum(count for _, count in self.left_out.most_common(MOST_REASONS))
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


def read_texts(source: AnySource) -> Iterator[str]:
    """The texts of a python or text source."""
    if isinstance(source, PythonSource):
        return (text for _, text in islice(read_split(held_out=False), source.limit))
    return (read_text(record) for record in read_records(source.path, split=source.split, limit=source.limit))


def read_template(source: ChatSource, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The source's own chat template, or None for the tokenizer's."""
    if source.chat_template is None:
        check_template(tokenizer, source.path)
        return None
    return read_given(Path(source.chat_template), "a Jinja chat template")


def read_prompts(
    data: Data, seed: int, tokenizer: PreTrainedTokenizerBase, settings: Answers, name: str, say: Say = silent
) -> list[list[int]]:
    """The prompts of `settings`, called `name` in the recipe, in a fixed order, shared among the sources by weight."""
    sources = data.sources
    if settings.prompts < len(sources):
        raise UserError(
            f"{name}.prompts: expected at least one for each of {len(sources)} sources, got {settings.prompts}"
        )
    prompts: list[list[int]] = []
    for source, wanted in zip(
        sources, shares([source.weight or 1.0 for source in sources], settings.prompts), strict=True
    ):
        if isinstance(source, ChatSource):
            found = _chat_prompts(source, tokenizer, settings.prompt_tokens, wanted, say)
        else:
            found = _text_prompts(source, tokenizer, settings.prompt_tokens, wanted, seed)
        if len(found) < wanted:
            raise UserError(
                f"{name}.prompts: {source_name(source)} gives {len(found)} prompts of at most "
                f"{settings.prompt_tokens} tokens, expected {wanted}; lower prompts or raise prompt_tokens"
            )
        prompts += found
    too_long = max(map(len, prompts)) + settings.new_tokens
    if too_long > data.context_length:
        raise UserError(
            f"data.context_length: expected at least {too_long}, the longest prompt and answer of {name}, "
            f"got {data.context_length}"
        )
    return prompts


def _chat_prompts(
    source: ChatSource, tokenizer: PreTrainedTokenizerBase, most: int, wanted: int, say: Say
) -> list[list[int]]:
    conversations = Conversations(source, tokenizer)
    short = (prompt for prompt in conversations.read(encode_prompt) if prompt and len(prompt) <= most)
    found = list(islice(short, wanted))
    if len(found) < wanted:  # the whole source is read
        conversations.check()
    conversations.report(say)
    return found


def _text_prompts(
    source: AnySource, tokenizer: PreTrainedTokenizerBase, most: int, wanted: int, seed: int
) -> list[list[int]]:
    """Openings at line starts in the first three quarters of texts, `most` / 4 to `most` tokens long."""
    texts = [text for text in islice(read_texts(source), wanted) if len(text) >= MIN_PROMPT_CHARACTERS]
    if not texts:
        return []
    random = np.random.default_rng((seed, 3))
    prompts: list[list[int]] = []
    for n in range(wanted):
        text = texts[n % len(texts)]
        length = int(random.integers(max(1, most // 4), most + 1))
        # A quarter of the prompts open a document; the others begin at a line somewhere inside it.
        start = 0 if random.random() < 0.25 else text.find("\n", int(random.integers(0, len(text) * 3 // 4 + 1))) + 1
        # No tokenizer packs more than 16 characters of real text in a token, on average.
        window = text[start : start + 16 * length]
        ids = tokenizer(window, return_attention_mask=False, verbose=False)["input_ids"]
        if ids[-1:] == [tokenizer.eos_token_id]:
            ids = ids[:-1]
        prompts.append(ids[:length] or tokenizer(text, verbose=False)["input_ids"][:length])
    return prompts


def source_name(source: AnySource) -> str:
    return "installed Python source" if isinstance(source, PythonSource) else source.path
