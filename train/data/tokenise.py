"""Sources read as tokenised documents, and what is printed of each before training: its form, its sizes, what is
skipped and why, and its first document with the labels marked."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eval.data.chat_template import ChatTemplate
from eval.data.data_files import RecordError
from heads.core.errors import UserError
from heads.targets.hub import tokenizer_key
from train.data.corpus import (
    Corpus,
    Document,
    Reader,
    Tally,
    fingerprint,
    has_documents,
    load_documents,
)
from train.data.recorded_ids import WHOLE
from train.data.sources import AnySource, ChatSource, skipped_document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "⟦", "⟧"
MAX_COLUMNS = 8
"""Number of columns to name, the most common first."""
MAX_CHARACTERS, MAX_STRETCH = 1200, 400
"""Number of characters to show of a document, and of each of its stretches of labels and of other tokens."""
MAX_REASONS = 5
"""Number of reasons to list for skipped records, the most common first."""
BATCH = 64
"""Records tokenised together."""
RECORDS_PER_PROCESS = 8192
"""Minimum number of records for each process that tokenises."""


def describe_skipped(source: AnySource, tally: Tally) -> list[str]:
    """Return the lines on a source's records that are held out, and on those that are skipped, by reason, if there are
    some. UserError if more are unusable than the source allows."""
    lines = []
    if tally.held_out:
        lines.append(
            f"{tally.held_out:,} of {tally.records:,} records are held out: they begin as one of held_out does"
        )
    if not tally.skipped:
        return lines
    reasons = [f"{count} {reason}" for reason, count in [*tally.skipped.items()][:MAX_REASONS]]
    if rest := sum([*tally.skipped.values()][MAX_REASONS:]):
        reasons.append(f"{rest} others")
    line = (
        f"{tally.num_skipped} of {tally.records} records are skipped: {', '.join(reasons)}; "
        f"the first is {source}{tally.first_skipped}"
    )
    if isinstance(source, ChatSource) and tally.num_skipped > source.max_skipped * tally.records:
        raise UserError(
            f"{source}: {line}; fix them, or allow more than max_skipped={source.max_skipped:g} of this source"
        )
    return [*lines, line]


def read_source(source: AnySource, name: str, reader: Reader) -> Corpus:
    """Return the documents of a source, and print what they are. `name`: the source's key in the recipe. UserError if
    there is nothing to train on."""
    corpus = reader.read(str(source), lambda: _tokenise_source(source, reader.rendering))
    tally = corpus.tally
    lines = [*source.unread(), *describe_skipped(source, tally)]
    template = describe_template(source, reader.rendering)
    if corpus.num_labels == 0:
        remedy = lines[0] if lines else "give longer ones"
        raise UserError(f"{source}: no token to train on in its {len(corpus)} texts; {remedy}")
    is_packed = all(form.startswith(WHOLE) for form in tally.forms)
    if source.kind == "chat" and tally.last_tokens < corpus.num_tokens and not is_packed:
        lines.append(
            "the chat template rewrites earlier turns, so answers are documents of their own: "
            f"{corpus.num_tokens / tally.last_tokens:.2f} times the conversations' tokens; {name}.answers=last trains "
            "on their last answers alone"
        )
    sizes = (
        f"{tally.records:,} records: {tally.records - tally.num_skipped - tally.held_out:,} {texts_of(source)}, "
        f"{corpus.num_tokens:,} tokens, {corpus.num_labels:,} labels"
    )
    reader.say(describe_source(f"{name}: {source}", sizes, corpus, reader.rendering.tokenizer, *lines, *template))
    return corpus


def describe_template(source: AnySource, rendering: ChatTemplate) -> list[str]:
    """Return the line on the arguments of a source's chat template that the recipe leaves at their defaults."""
    if not isinstance(source, ChatSource):
        return []
    line, other = source.template(rendering).left_at_default
    return [f"{line}; data.template.{other} changes the prompts"] if line else []


def texts_of(source: AnySource) -> str:
    return "conversations" if source.kind == "chat" else "texts"


def _tokenise_source(source: AnySource, rendering: ChatTemplate) -> Corpus:
    """Return the documents of a source, tokenised by several processes if it is large."""
    name = fingerprint({"records": source.content(), **tokens_key(source, rendering)})
    number = 0
    if not has_documents(name) and (number := sum(1 for _ in source.records())) == 0:
        raise UserError(f"{source}: holds no records; expected some text or conversations")
    processes = max(1, min(len(os.sched_getaffinity(0)), number // RECORDS_PER_PROCESS))
    size = -(-number // processes)
    shares = [range(n * size, (n + 1) * size) for n in range(processes)]
    with tempfile.TemporaryDirectory() as folder:
        fault = Path(folder, "fault")  # `datasets` gives the faults of other processes as a text with their traceback
        try:
            return load_documents(name, partial(_tokenise_share, source, rendering, fault, os.getpid()), shares)
        except Exception:
            if fault.is_file():
                raise UserError(fault.read_text()) from None
            raise


def tokens_key(source: AnySource, rendering: ChatTemplate) -> dict[str, object]:
    limit = {} if rendering.limit is None else {"vocab_size": rendering.limit}
    return {"tokenizer": tokenizer_key(rendering.tokenizer), **limit, **source.key(rendering)}


def _tokenise_share(
    source: AnySource, rendering: ChatTemplate, fault: Path, process: int, share: range
) -> Iterator[list[Document]]:
    """Yield the documents of each record whose number is in `share`."""
    if os.getpid() != process:  # one of several, which leaves signals to the run
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    records = islice(source.records(), share.start, share.stop)
    try:
        while batch := [*islice(records, BATCH)]:
            for (place, _), documents in zip(batch, source.documents(rendering, batch), strict=True):
                try:
                    rendering.check_ids(np.concatenate([document.ids for document in documents]), place)
                    yield documents
                except RecordError as error:
                    yield [skipped_document(error, str(source))]
    except UserError as error:
        fault.write_text(str(error))
        raise


def describe_source(title: str, sizes: str, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *lines: str) -> str:
    """Return the lines on a corpus. `lines`: those that come after its sizes."""
    tally = corpus.tally
    forms = [f"{form}: {count:,} records" if len(tally.forms) > 1 else form for form, count in tally.forms.items()]
    described = [title, *(["form: " + "; ".join(forms)] if forms else []), sizes, *lines]
    described += [f"{count:,} {note}" for note, count in tally.notes.items()]
    if len(tally.unread) == 1:
        described.append(f"column '{next(iter(tally.unread))}' is not read")
    elif tally.unread:
        names = ", ".join(f"'{column}'" for column in [*tally.unread][:MAX_COLUMNS])
        others = f" and {len(tally.unread) - MAX_COLUMNS} others" if len(tally.unread) > MAX_COLUMNS else ""
        described.append(f"columns {names}{others} are not read")
    document = next(iter(corpus), None)
    if document is not None:
        what = f"labels in {OPEN}{CLOSE}" if document.labels.any() else "without labels"
        described.append(f"the first of {len(corpus):,} documents, {len(document.ids):,} tokens, {what}:")
        text = marked(tokenizer, document, MAX_STRETCH)
        described += _clipped(text, MAX_CHARACTERS).splitlines()
    return "\n  ".join(described)


def marked(tokenizer: PreTrainedTokenizerBase, document: Document, most: int | None = None) -> str:
    """Return the text of a document with its labels in brackets. `most`: number of characters to show of a stretch."""
    ids, labels = document.ids.tolist(), document.labels.tolist()
    bounds = [n for n in range(1, len(ids)) if labels[n] != labels[n - 1]]
    stretches = zip([0, *bounds], [*bounds, len(ids)], strict=True)
    texts = [
        (_clipped(str(tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)), most), labels[start])
        for start, end in stretches
    ]
    return "".join(f"{OPEN}{text}{CLOSE}" if label else text for text, label in texts)


def _clipped(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text) - most:,} characters ...] {text[-(most // 2) :]}"
