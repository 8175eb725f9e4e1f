"""What is printed of each source before training: its form, its sizes, what is left out and why, and its first document
with the labels marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.data.corpus import Corpus, Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "⟦", "⟧"
MOST_COLUMNS = 8
"""Number of columns to name, the most common first."""
MOST_CHARACTERS, MOST_TOGETHER = 1200, 400
"""Number of characters to show of a document, and of each of its stretches of labels and of other tokens."""


def screen(title: str, sizes: str, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *lines: str) -> str:
    """Return the lines on a corpus. `lines`: those that come after its sizes."""
    tally = corpus.tally
    forms = [f"{form}: {count:,} records" if len(tally.forms) > 1 else form for form, count in tally.forms.items()]
    found = [title, *(["form: " + "; ".join(forms)] if forms else []), sizes, *lines]
    found += [f"{count:,} {note}" for note, count in tally.notes.items()]
    if tally.unread:
        names = ", ".join(f"'{column}'" for column in [*tally.unread][:MOST_COLUMNS])
        others = f" and {len(tally.unread) - MOST_COLUMNS} others" if len(tally.unread) > MOST_COLUMNS else ""
        found.append(
            f"columns {names}{others} are not read" if len(tally.unread) > 1 else f"column {names} is not read"
        )
    document = next(iter(corpus), None)
    if document is not None:
        what = f"labels in {OPEN}{CLOSE}" if document.labels.any() else "without labels"
        found.append(f"the first of {len(corpus):,} documents, {len(document.ids):,} tokens, {what}:")
        text = marked(tokenizer, document, MOST_TOGETHER)
        found += _clipped(text, MOST_CHARACTERS).splitlines()
    return "\n  ".join(found)


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
