"""Records that carry token ids, as servers and other tools write them: their ids are trained on as they are.

A text tokenised again need not give the tokens that a model wrote, and says nothing about an answer that was cut at its
limit. The forms, by their columns:

* `exchanges`: pairs of a prompt and its answer, as `data.regenerate` writes them;
* `prompt_ids` and `completion_ids`, with a mask of the completion where it holds results of tools, too;
* `input_ids` with the labels' mask in `loss_mask`, `completion_mask`, `assistant_masks` or `labels` (-100: no label).
  Tokens of `attention_mask` 0 are padding. A packed row is several documents: one begins where `position_ids` begin
  again, or behind as many tokens as `seq_lengths` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from eval.data.data_files import Message, Record, RecordError
from eval.data.template_traits import blank
from heads.core.errors import shown
from train.data.chats import join_texts
from train.data.corpus import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXCHANGES = "exchanges"
PROMPT = "prompt_ids"
COMPLETION = "completion_ids"
WHOLE = "input_ids"
ATTENTION = "attention_mask"
POSITIONS = "position_ids"
LENGTHS = "seq_lengths"
MASKS = ("loss_mask", "completion_mask", "assistant_masks", "labels")
COLUMNS = (EXCHANGES, PROMPT, COMPLETION, WHOLE, ATTENTION, POSITIONS, LENGTHS, *MASKS, "cut", "number")
"""Columns of token ids and of their masks, and what `data.regenerate` writes beside them."""
IGNORED = -100
"""Value in `labels` of a token that is no label."""
UNREADABLE = "unreadable token ids"
"""Reason of a record whose ids, or masks, are no lists of whole numbers that fit each other."""


def form_of(fields: Mapping[str, object]) -> tuple[str, ...]:
    """Return the columns from which a record's documents are made, or none for a record without token ids."""
    if fields.get(EXCHANGES):
        return (EXCHANGES,)
    masks = tuple(name for name in MASKS if isinstance(fields.get(name), list))
    if fields.get(COMPLETION) is not None:
        return (PROMPT, COMPLETION, *masks)
    return (WHOLE, *masks) if masks and fields.get(WHOLE) is not None else ()


def read_ids(record: Record, num_tokens: int, *, last_only: bool = False) -> list[Document]:
    """Return the documents of a record with token ids, whose labels are its answers' ids and none but them.

    Args:
        num_tokens: Number of the target's tokens, which every id must be below.
        last_only: Only the last answer is labelled, of each document of a packed row.

    Raises:
        RecordError: For lists that do not fit each other or the vocabulary, or label nothing.
    """
    place, fields = record
    columns = form_of(fields)
    if columns == (EXCHANGES,):
        pairs = _exchanges(place, fields[EXCHANGES], num_tokens)
        documents = join_texts((len(prompt), [*prompt, *answer]) for prompt, answer in pairs)
        documents = documents[-1:] if last_only else documents
    else:
        documents = _masked(place, fields, columns, num_tokens)
    if last_only:
        documents = [*map(_last_answer, documents)]
    if not any(document.labels.any() for document in documents):
        raise RecordError(f"{place}: {' with '.join(columns)}: expected a label, got none", "without an answer")
    return documents


def check_spelling(
    place: str, tokenizer: PreTrainedTokenizerBase, pieces: Sequence[NDArray[np.int32]], texts: Iterable[str]
) -> None:
    """Raise RecordError if the ids do not spell one of the texts that the record has besides. White space may differ,
    and special tokens may be left out of the text."""

    def spell(skip_special_tokens: bool) -> str:
        spelt = [
            tokenizer.decode(ids, clean_up_tokenization_spaces=False, skip_special_tokens=skip_special_tokens)
            for ids in pieces
        ]
        return blank("".join(map(str, spelt)))

    spellings = [spell(False), spell(True)]
    for text in texts:
        if not any(blank(text) in spelt for spelt in spellings):
            raise RecordError(
                f"{place}: expected its token ids to spell the text {shown(text)}, got {shown(spellings[0])}; take "
                "their column out to train on the text's own tokens",
                "whose token ids do not spell their text",
            )


def check_weights(place: str, documents: Iterable[Document], messages: Sequence[Message], num_trained: int) -> None:
    """Raise RecordError if the ids label more answers than the conversation beside them, which has some of weight 0."""
    labelled = sum(int((np.diff(document.labels.astype(np.int8), prepend=0) == 1).sum()) for document in documents)
    if labelled > num_trained and any(message.get("weight") == 0 for message in messages):
        raise RecordError(
            f"{place}: expected labels for {num_trained} answers, got {labelled}: others have weight 0; take their ids "
            "out, or the weights",
            "whose token ids label an answer of weight 0",
        )


def _exchanges(place: str, exchanges: object, num_tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    if not isinstance(exchanges, list):
        raise _unreadable(f"{place}: {EXCHANGES}", "a list of pairs of prompt ids and answer ids", exchanges)
    for number, pair in enumerate(exchanges):
        here = f"{place}: {EXCHANGES}[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise _unreadable(here, "a pair of prompt ids and answer ids", pair)
        yield _ids(f"{here}[0]", pair[0], num_tokens), _ids(f"{here}[1]", pair[1], num_tokens)


def _ids(place: str, value: object, num_tokens: int) -> list[int]:
    ids = _integers(place, value)
    if (odd := next((token for token in ids if not 0 <= token < num_tokens), None)) is not None:
        what = f"{place}: expected ids from 0 to {num_tokens - 1}, the target's tokens, got {odd}"
        raise RecordError(what, "with a token that the target has no row for")
    return ids


def _integers(place: str, value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(item) in (int, bool) for item in value):
        raise _unreadable(place, "a list of whole numbers", value)
    return value


def _masked(place: str, fields: Mapping[str, object], columns: Sequence[str], num_tokens: int) -> list[Document]:
    """Return the documents of one row of ids, or of a prompt and its completion. A token is a label if all masks say
    so. A mask as long as a completion is that of its tokens."""
    names, masks = (columns[:1], columns[1:]) if columns[0] == WHOLE else (columns[:2], columns[2:])
    parts = [_integers(f"{place}: {name}", fields.get(name)) for name in names]
    ids = np.array([token for part in parts for token in part], dtype=np.int64)
    before = len(ids) - len(parts[-1])
    labels = np.arange(len(ids)) >= before
    kept = np.ones_like(labels)
    for name in [*masks, *([ATTENTION] if isinstance(fields.get(ATTENTION), list) else [])]:
        values = np.array(_integers(f"{place}: {name}", fields[name]), dtype=np.int64)
        if len(values) == len(parts[-1]):
            values = np.concatenate([ids[:before] if name == "labels" else np.ones(before, dtype=np.int64), values])
        if len(values) != len(ids):
            raise _unreadable(f"{place}: {name}", f"{len(parts[-1])} values, as {names[-1]} has", len(values))
        if name == "labels":
            if ((values != IGNORED) & (values != ids)).any():
                what = f"{IGNORED} or the id of {names[-1]} in each place"
                raise _unreadable(f"{place}: {name}", what, fields[name])
            labels &= values != IGNORED
        elif not np.isin(values, (0, 1)).all():
            raise _unreadable(f"{place}: {name}", "0 or 1 for each token", fields[name])
        elif name == ATTENTION:
            kept = values == 1
        else:
            labels &= values == 1
    for name, span in ((names[0], slice(before)), (names[-1], slice(before, None))):
        _ids(f"{place}: {name}", ids[span][kept[span]].tolist(), num_tokens)
    starts = _starts(place, fields, len(ids)) if names == (WHOLE,) else []
    pieces = [places[kept[places]] for places in np.split(np.arange(len(ids)), starts)]
    return [Document.of(ids[own].tolist(), labels[own]) for own in pieces if labels[own].any()]


def _starts(place: str, fields: Mapping[str, object], length: int) -> list[int]:
    """Return the places in a packed row of ids at which its documents begin, without the first."""
    lengths, positions = fields.get(LENGTHS), fields.get(POSITIONS)
    if isinstance(lengths, list):
        ends: list[int] = np.cumsum(_integers(f"{place}: {LENGTHS}", lengths)).tolist()
        if ends[-1:] != [length] or min(lengths) < 1:
            raise _unreadable(f"{place}: {LENGTHS}", f"lengths whose sum is {length}, as {WHOLE} has", lengths)
        return ends[:-1]
    if not isinstance(positions, list) or any(isinstance(item, list) for item in positions):  # several axes of images
        return []
    values = np.array(_integers(f"{place}: {POSITIONS}", positions), dtype=np.int64)
    if len(values) != length:
        raise _unreadable(f"{place}: {POSITIONS}", f"{length} values, as {WHOLE} has", len(values))
    return (np.flatnonzero(np.diff(values) <= 0) + 1).tolist()


def _last_answer(document: Document) -> Document:
    """Return a document whose labels are the last stretch of its labels, without what follows them."""
    (places,) = np.nonzero(document.labels)
    if len(places) == 0:
        return document
    end = int(places[-1]) + 1
    gaps = np.flatnonzero(~document.labels[:end])
    start = int(gaps[-1]) + 1 if len(gaps) else 0
    return Document.of(document.ids[:end].tolist(), np.arange(end) >= start)


def _unreadable(place: str, expected: str, got: object) -> RecordError:
    return RecordError(f"{place}: expected {expected}, got {shown(got)}", UNREADABLE)
