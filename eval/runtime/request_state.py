"""A row of the batch and the request that holds it: what the host knows of them between two looks.

Letters: M tokens a round can emit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from eval.runtime.readback import Report
from eval.runtime.request import Output, Request
from eval.runtime.stops import StopWatch


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
