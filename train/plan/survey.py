"""The conversations of a recipe's sources that a target can answer, and those that are held out."""

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from eval.core.command_line import print_line
from eval.core.progress import Progress
from eval.data.conversation_forms import ARGUMENTS
from eval.data.data_files import Record, RecordError
from heads.core.errors import UserError
from train.data.corpus import TOO_LONG, Tally
from train.data.dialogues import ASKED, first_turns, read_asked
from train.data.tokenise import describe_skipped

if TYPE_CHECKING:
    from eval.data.chat_template import ChatTemplate

SHARE, MIN_HELD_OUT, MAX_HELD_OUT = 0.05, 16, 80
"""Fraction of the conversations that is held out, and the bounds of their number."""
MAX_SHARE, FEW = 0.2, 8
"""Largest fraction that is held out of few conversations, but for so many of them."""
MIN_CONVERSATIONS = 20
"""A run needs this many conversations, those held out included."""


Turns = tuple[str, ...]
"""The turns before a conversation's first answer (`first_turns`)."""


class Candidate(NamedTuple):
    """A conversation that may be held out. Those with the smallest hashes are."""

    hash: bytes
    record: int
    turns: Turns
    text: str
    """The conversation as a line of JSON, without answers that are to be given."""


@dataclass
class Survey:
    """The conversations of all sources that can be answered."""

    records: int = 0
    counts: Counter[Turns] = field(default_factory=Counter)
    lengths: dict[Turns, int] = field(default_factory=dict)
    """Tokens of the first prompt."""
    with_turns: int = 0
    """Conversations with several answers."""
    candidates: list[Candidate] = field(default_factory=list)
    """At least the `MAX_HELD_OUT` conversations with the smallest hashes."""
    notes: Counter[str] = field(default_factory=Counter)
    """Number of records of which each note is made."""
    fault: str = ""
    """Why the first record that cannot be used is left out."""
    tallies: list[Tally] = field(default_factory=list)
    """The records of each source, and those that are skipped."""

    def add(self, record: Record, length: int, notes: str) -> None:
        """Add a record whose first prompt has `length` tokens."""
        turns = first_turns(record)
        chat = read_asked(record)
        assert turns is not None
        if turns not in self.counts:
            messages = [message for message in chat.messages if message is not ASKED]
            more = {name: value for name, value in ((ARGUMENTS, chat.arguments), ("tools", chat.tools)) if value}
            text = json.dumps({"messages": messages, **more}, ensure_ascii=False)
            digest = hashlib.sha256("\0".join(turns).encode()).digest()
            self.candidates.append(Candidate(digest, self.records, turns, text))
            if len(self.candidates) > 2 * MAX_HELD_OUT:
                self.candidates = heapq.nsmallest(MAX_HELD_OUT, self.candidates)
        self.counts[turns] += 1
        self.lengths[turns] = length
        self.notes.update(notes.splitlines())
        self.with_turns += sum(message["role"] == "assistant" for message in chat.messages) > 1

    def held_out(self) -> list[Candidate]:
        """Return the conversations to hold out, in the order of the data."""
        fewest = min(MIN_HELD_OUT, max(FEW, int(MAX_SHARE * len(self.counts))))
        number = min(max(round(SHARE * len(self.counts)), fewest), MAX_HELD_OUT)
        return sorted(heapq.nsmallest(number, self.candidates), key=lambda candidate: candidate.record)


def check_survey(survey: Survey, sources: Sequence[Any], prompt_tokens: int) -> None:
    """Print what is left out of the sources. UserError if too few conversations are left, or if more are unusable than
    a source allows."""
    unread = [line for each in sources for line in each.unread()]
    for line in [*unread, *(f"{count:,} {note}" for note, count in survey.notes.items())]:
        print_line(line)
    if len(survey.counts) < MIN_CONVERSATIONS:
        why = f"; the first that cannot be used: {survey.fault}" if survey.fault else ""
        raise UserError(
            f"{', '.join(map(str, sources))}: expected at least {MIN_CONVERSATIONS} conversations with different "
            f"first prompts of at most {prompt_tokens} tokens, got {len(survey.counts)} in {survey.records} records"
            f"{why}"
        )
    for source, tally in zip(sources, survey.tallies, strict=True):
        for line in describe_skipped(source, tally):
            print_line(f"{source}: {line}")
        if tally.too_long:
            line = f"{tally.too_long:,} records begin with a prompt of more than {prompt_tokens:,} tokens"
            print_line(f"{source}: {line} (data.regenerate.prompt_tokens) and are skipped")


def read_conversations(sources: Sequence[Any], rendering: "ChatTemplate", prompt_tokens: int) -> Survey:
    """Return the conversations of sources whose first prompt has at most `prompt_tokens` tokens."""
    survey = Survey()
    with Progress("reading the conversations"):
        for source in sources:
            template = source.template(rendering)
            begin = survey.records
            skipped: Counter[str] = Counter()
            first = ""
            for record in source.records():
                survey.records += 1
                dialogue = source.dialogue(template, record, prompt_tokens)
                if isinstance(dialogue, RecordError):
                    skipped[dialogue.reason] += 1
                    first = first or str(dialogue)
                    survey.fault = survey.fault or str(dialogue) or f"{record[0]}: its first prompt has more tokens"
                else:
                    survey.add(record, len(dialogue.prompt), dialogue.about["notes"])
            too_long = skipped.pop(TOO_LONG, 0)
            reasons = dict(skipped.most_common())
            first = first.removeprefix(str(source))
            survey.tallies.append(Tally(survey.records - begin, reasons, first, too_long))
    return survey
