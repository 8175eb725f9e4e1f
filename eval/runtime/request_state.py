"""A row of the batch and its request, as the host knows them between two polls.

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
