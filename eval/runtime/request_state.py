"""A row of the batch, the request that holds it, and what the host learns of it.

A round ends by writing a report. The host has it copied to memory of its own, launches more rounds, and only then reads
it: by that time it has long arrived, and the device never waits.

Letters: B rows, M tokens a round can emit, T tokens a report shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eval.runtime.request import Output, Request

SLACK = 16
"""Tokens looked at beyond the longest a stop string can be, for tokens that show as nothing."""


@dataclass(frozen=True)
class Report:
    """One row, after a round."""

    done: bool
    output_length: int
    length: int
    tail: list[int]
    """The last tokens of the output, all of it where it is shorter than that."""


class Reports:
    """Places for the reports on their way, used in turn."""

    def __init__(self, source: Tensor, places: int) -> None:
        """source (B, 3 + T): the device's own, `RoundState.report`; places: reports on their way at once, at most."""
        cuda = source.is_cuda
        self.source = source
        self.places = [torch.empty(source.shape, dtype=source.dtype, pin_memory=cuda) for _ in range(places)]
        self.arrivals = [torch.cuda.Event() if cuda else None for _ in range(places)]
        self.sent = self.read = 0

    def send(self) -> None:
        """Have the report, as it stands after all that was launched, copied."""
        assert self.sent - self.read < len(self.places), (self.sent, self.read)
        place = self.sent % len(self.places)
        self.places[place].copy_(self.source, non_blocking=True)
        arrival = self.arrivals[place]
        if arrival is not None:
            arrival.record()
        self.sent += 1

    def receive(self) -> list[Report]:
        """Every row's report, the oldest one sent."""
        assert self.read < self.sent
        place = self.read % len(self.places)
        arrival = self.arrivals[place]
        if arrival is not None:
            arrival.synchronize()
        self.read += 1
        return [
            Report(bool(done), output_length, length, tail[max(0, len(tail) - output_length) :])
            for done, output_length, length, *tail in self.places[place].tolist()
        ]


class StopWatch:
    """Finds the first token at which the text of a generation contains a stop string.

    The rule: the output ends with the earliest token i such that the decoded text of tokens 0 .. i contains one of
    the strings (the prompt does not count, and the token is kept). It is asked token by token, so it depends on the
    tokens alone and not on how many of them a round brought. Only the tail of the tokens is decoded each time: a
    character takes at most 4 byte tokens.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.stops, self.tokenizer = tuple(stops), tokenizer
        self.reach = 4 * max(map(len, stops)) + SLACK
        self.looked_at = 0

    def find(self, tokens: Sequence[int]) -> int | None:
        """How many of the tokens the output keeps, None where no stop string is complete. Call it as tokens come in."""
        for end in range(self.looked_at + 1, len(tokens) + 1):
            tail = list(islice(tokens, max(0, end - self.reach), end))
            text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if any(stop in text for stop in self.stops):
                return end
        self.looked_at = len(tokens)
        return None


@dataclass
class RequestState:
    """One request, from its prompt's pass to its end."""

    index: int
    """The request's, among all."""
    request: Request
    first_round: int
    """Rounds of the whole batch before its own first."""
    watch: StopWatch | None
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    """Whether a stop string ended it, or whoever follows its tokens."""

    def __post_init__(self) -> None:
        self.most_tokens = len(self.request.prompt)
        """At most this many tokens stand in the row's cache, whatever the rounds launched give."""
        self.left = self.request.max_new_tokens - 1
        """Tokens it may still get, at most, after the rounds launched: each gives one at least."""

    @property
    def limit(self) -> int:
        """Tokens of prompt and output, at most."""
        return len(self.request.prompt) + self.request.max_new_tokens

    def launch(self, M: int) -> None:
        """Reckon with a round more."""
        self.most_tokens = min(self.most_tokens + M, self.limit)
        self.left -= 1

    def learn(self, report: Report, under_way: int, M: int) -> list[int]:
        """Take in a report, `under_way` rounds having been launched since; -> the tokens that are new."""
        before = len(self.tokens)
        self.left = self.request.max_new_tokens - report.output_length - under_way
        self.most_tokens = min(report.length + M * under_way, self.limit)
        self.tokens += report.tail[len(report.tail) - (report.output_length - before) :]
        stop_at = self.watch.find(self.tokens) if self.watch is not None else None
        if stop_at is not None:
            del self.tokens[stop_at:]
            self.stopped = True
        return self.tokens[before:]

    def output(self, accepted: Sequence[int], reached: Sequence[int], eos_token_ids: Sequence[int]) -> Output:
        """The record of a request that ended. accepted, reached: of each round of the row, as in `Output`; rounds that
        a stop string left behind are not in it."""
        kept_by_round, tested_by_round, left = [], [], len(self.tokens) - 1
        for kept, tested in zip(accepted, reached, strict=True):
            if left == 0:
                break
            kept_by_round.append(min(kept, left))
            tested_by_round.append(min(tested, left))
            left -= min(kept + 1, left)
        at_eos = self.tokens[-1] in eos_token_ids and not self.request.ignore_eos
        reason: Literal["eos", "stop", "length"] = "eos" if at_eos else "stop" if self.stopped else "length"
        return Output(self.tokens, reason, len(kept_by_round), kept_by_round, tested_by_round, self.first_round)
