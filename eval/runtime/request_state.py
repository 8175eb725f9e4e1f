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
"""Number of tokens searched beyond the longest that a stop string can be, for tokens that show as nothing."""


@dataclass(frozen=True)
class Report:
    """Report of one row after a round."""

    done: bool
    output_length: int
    length: int
    tail: list[int]
    """Last tokens of the output, or all of it if it is shorter."""


class Reports:
    """Buffers for reports under way, used in turn."""

    def __init__(self, source: Tensor, count: int) -> None:
        """source (B, 3 + T): `RoundState.report` on the device; count: maximum number of reports under way."""
        cuda = source.is_cuda
        self.source = source
        self.buffers = [torch.empty(source.shape, dtype=source.dtype, pin_memory=cuda) for _ in range(count)]
        self.arrivals = [torch.cuda.Event() if cuda else None for _ in range(count)]
        self.sent = self.read = 0

    def send(self) -> None:
        """Copy the report as it is after all work launched so far."""
        assert self.sent - self.read < len(self.buffers), (self.sent, self.read)
        index = self.sent % len(self.buffers)
        self.buffers[index].copy_(self.source, non_blocking=True)
        arrival = self.arrivals[index]
        if arrival is not None:
            arrival.record()
        self.sent += 1

    def receive(self) -> list[Report]:
        """Return every row's report, from the oldest unread copy."""
        assert self.read < self.sent
        index = self.read % len(self.buffers)
        arrival = self.arrivals[index]
        if arrival is not None:
            arrival.synchronize()
        self.read += 1
        return [
            Report(bool(done), output_length, length, tail[max(0, len(tail) - output_length) :])
            for done, output_length, length, *tail in self.buffers[index].tolist()
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
        """Return the number of tokens that the output keeps, or None if no stop string is complete. Call it as tokens
        come in."""
        for end in range(self.looked_at + 1, len(tokens) + 1):
            tail = list(islice(tokens, max(0, end - self.reach), end))
            text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if any(stop in text for stop in self.stops):
                return end
        self.looked_at = len(tokens)
        return None


@dataclass
class RequestState:
    """State of one request, from its prompt's pass to its end."""

    index: int
    """Index of the request among all."""
    request: Request
    first_round: int
    """Rounds of the whole batch before its first."""
    watch: StopWatch | None
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    """True if it was ended by a stop string or by the callback."""

    def __post_init__(self) -> None:
        self.most_tokens = len(self.request.prompt)
        """Upper bound on the tokens in the row's cache after the rounds launched."""
        self.left = self.request.max_new_tokens - 1
        """Upper bound on the tokens still to come after the rounds launched, each of which gives at least one."""

    @property
    def limit(self) -> int:
        """Maximum number of tokens of prompt and output."""
        return len(self.request.prompt) + self.request.max_new_tokens

    def launch(self, M: int) -> None:
        """Count one more round as launched."""
        self.most_tokens = min(self.most_tokens + M, self.limit)
        self.left -= 1

    def learn(self, report: Report, under_way: int, M: int) -> list[int]:
        """Add a report, with `under_way` rounds launched since. Return the new tokens."""
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
        """Return the output of a request that ended. accepted, reached: of each round of the row, as in `Output`;
        rounds after a stop string are dropped."""
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
