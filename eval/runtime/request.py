"""Requests to the runtime, what the host learns of each while it runs, its text, and its output.

A round ends by writing a report. The host has it copied to memory of its own, launches more rounds, and only then reads
it: by that time it has long arrived, and the device never waits.

Letters: B rows, M tokens a round can emit, T tokens a report shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.target.frozen import FrozenTarget

SLACK = 16
"""Number of tokens searched beyond the longest that a stop string can be, for tokens that show as nothing."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text that a tokenizer gives for bytes of an incomplete character."""


@dataclass(frozen=True)
class Request:
    """One prompt and the settings of its output."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Stop strings: the output ends with the first token that completes one of them in its text."""
    ignore_eos: bool = False


@dataclass
class Output:
    """Output of a request. The first token comes from the prompt's own pass; rounds made the others."""

    tokens: list[int]
    finish_reason: Literal["eos", "stop", "length"]
    accepted: list[int]
    """Draft tokens in the output by round. The round's last token is the target's own, unless the last round is cut at
    a draft token."""
    reached: list[int]
    """Deepest level tested by round; min(accepted + 1, levels drafted), less where the output's end cut the round."""
    start: int = 0
    """Tokens of the prompt: the position of the first token."""
    first_round: int = 0
    """Number of rounds of the batch before this request's first: its round r is the batch's first_round + r."""

    @property
    def rounds(self) -> int:
        """Number of target passes after the prompt's."""
        return len(self.accepted)

    @property
    def decoded(self) -> int:
        """Number of tokens that rounds made."""
        return len(self.tokens) - 1

    def emitted(self) -> list[int]:
        """Tokens in the output by round; one less than usual where the output's end cut off the target's own."""
        counts = [count + 1 for count in self.accepted]
        if counts:
            counts[-1] -= sum(counts) - self.decoded
        return counts

    def drafted(self) -> list[bool]:
        """Return, for every token, True if it was drafted and accepted, and False if the target's own pass made it."""
        flags = [False]
        for count in self.accepted:
            flags += [True] * count + [False]
        return flags[: len(self.tokens)]


def check_request(request: Request, name: str, *, target: FrozenTarget, slots: int, nodes: int, can_stop: bool) -> None:
    """Raise UserError, starting with `name`, for a request that a target cannot decode in `slots` slots with trees of
    `nodes`; `can_stop`: stop strings can be searched for."""
    prompt = len(request.prompt)
    if prompt == 0:
        raise UserError(f"{name}: the prompt is empty; expected at least one token")
    if not 0 <= min(request.prompt) <= max(request.prompt) < target.vocab_size:
        raise UserError(
            f"{name}: the prompt has token ids outside 0 .. {target.vocab_size - 1}; use the target's tokenizer"
        )
    start = target.start_token
    if start is not None and start not in request.prompt[1:]:
        raise UserError(
            f"{name}: the prompt of an encoder-decoder is its encoder's input, then its start token {start}, which "
            "begins the answer; a chat template puts it there"
        )
    if request.max_new_tokens < 1:
        raise UserError(f"{name}: max_new_tokens must be at least 1, got {request.max_new_tokens}")
    needed = prompt + request.max_new_tokens + nodes
    if needed > slots:
        raise UserError(
            f"{name}: a prompt of {prompt} tokens, {request.max_new_tokens} new ones and a tree of {nodes} need "
            f"{needed} slots, but there are {slots}; shorten the prompt, ask for fewer tokens or raise max_length"
        )
    if request.stop and not can_stop:
        raise UserError(f"{name}: stop strings need a tokenizer; give the engine one")
    if not all(request.stop):
        raise UserError(f"{name}: an empty stop string would end every output; leave it out")


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

    def __init__(self, source: Tensor, count: int, *, on_host: bool) -> None:
        """source (B, 3 + T): `RoundState.report` on the device; count: maximum number of reports under way."""
        self.source = source
        self.buffers = [torch.empty(source.shape, dtype=source.dtype, pin_memory=not on_host) for _ in range(count)]
        self.arrivals = [None if on_host else torch.cuda.Event() for _ in range(count)]
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
        start = len(self.request.prompt)
        return Output(self.tokens, reason, kept_by_round, tested_by_round, start, self.first_round)


class Detokenizer:
    """The texts of a generation's tokens, one after another; together they are the text of all tokens.

    A token's text depends on the token before it (some tokenizers drop a leading space), and a character may need up to
    four byte tokens. So only the tokens since the last whole character are decoded anew, behind the ones that brought
    that character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False) -> None:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        self.decode: Callable[[list[int]], Any] = partial(tokenizer.decode, **options)
        self.known: list[int] = []
        """Tokens already shown on which the text of the next one may depend."""
        self.waiting: list[int] = []
        """Tokens not yet shown."""

    def push(self, token: int) -> str:
        """Add a token. Return the text that it completes, empty if it ends inside a character."""
        self.waiting.append(token)
        text = self._rest()
        if text.endswith(INCOMPLETE):
            return ""
        self._shown(text)
        return text

    def flush(self) -> str:
        """Return the remaining text if the output ends inside a character."""
        text = self._rest() if self.waiting else ""
        self._shown(text)
        return text

    def _shown(self, text: str) -> None:
        if text:  # tokens without a text of their own, such as special ones, are no context for the next
            self.known, self.waiting = self.waiting, []

    def _rest(self) -> str:
        return str(self.decode(self.known + self.waiting)[len(self.decode(self.known)) :])
