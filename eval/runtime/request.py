"""Requests to the runtime, their state on the host while they run, their text and their output.

A round ends with a report. The host starts a copy of it to its own memory, launches more rounds, and only then reads
the copy, which has arrived by then. So the device never waits.

Letters: B rows, M tokens a round can emit, T tokens in a report.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eval.runtime.sampling_params import Sampling
from heads.core.errors import UserError
from heads.targets.frozen_target import FrozenTarget

SLACK = 16
"""Number of tokens searched in addition to the longest possible stop string, because some tokens have no text."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text that a tokenizer returns for the bytes of an incomplete character."""


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Stop strings. The output ends with the first token that completes one of them in its text."""
    ignore_eos: bool = False


@dataclass
class Output:
    """Output of a request. The prompt's pass produces the first token, and rounds produce the other tokens."""

    tokens: list[int]
    finish_reason: Literal["eos", "stop", "length"]
    accepted: list[int]
    """Number of draft tokens in the output, by round. The target chooses the last token of a round, unless the output
    ends the round at a draft token."""
    reached: list[int]
    """Deepest level tested, by round: min(accepted + 1, levels drafted), or less in a round cut by the output's end."""
    start: int = 0
    """Number of tokens of the prompt, which is the position of the first output token."""
    first_round: int = 0
    """Number of rounds of the batch before this request's first: its round r is the batch's round first_round + r."""
    copied: list[bool] = field(default_factory=list)
    """By round: True if its draft was copied from the text, not drawn by a head. Empty if that is not known."""

    @property
    def rounds(self) -> int:
        """Number of target passes after the prompt's pass."""
        return len(self.accepted)

    @property
    def decoded(self) -> int:
        """Number of tokens produced by rounds."""
        return len(self.tokens) - 1

    def emitted(self) -> list[int]:
        """Return the number of tokens in the output, by round: accepted + 1, or one less in a last round whose bonus
        token was cut off."""
        counts = [count + 1 for count in self.accepted]
        if counts:
            counts[-1] -= sum(counts) - self.decoded
        return counts

    def text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the text as engines return it: without the token that ended it, and without special tokens."""
        return str(tokenizer.decode(self.written, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def written(self) -> list[int]:
        """The tokens without the one that ended them."""
        return self.tokens[:-1] if self.finish_reason == "eos" else self.tokens

    def drafted(self) -> list[bool]:
        """Return for every token True if it is an accepted draft token, and False if the target chose it."""
        flags = [False]
        for count in self.accepted:
            flags += [True] * count + [False]
        return flags[: len(self.tokens)]


def check_request(request: Request, name: str, *, target: FrozenTarget, slots: int, nodes: int, can_stop: bool) -> None:
    """Raise UserError, starting with `name`, if a target cannot decode a request in `slots` slots with trees of `nodes`
    nodes. `can_stop`: True if there is a tokenizer to search for stop strings."""
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
    needed = prompt + request.max_new_tokens + nodes
    if needed > slots:
        raise UserError(
            f"{name}: a prompt of {prompt} tokens, {request.max_new_tokens} new ones and a tree of {nodes} need "
            f"{needed} slots, but there are {slots}; shorten the prompt, ask for fewer tokens or raise max_length"
        )
    if request.stop and not can_stop:
        raise UserError(f"{name}: stop strings need a tokenizer; give the engine one")


@dataclass(frozen=True)
class Report:
    """Report of one row after a round."""

    done: bool
    output_length: int
    length: int
    tail: list[int]
    """Last T tokens of the output, or all tokens of a shorter output."""


class Reports:
    """Host buffers for reports under way, used in turn."""

    def __init__(self, source: Tensor, count: int, *, on_host: bool) -> None:
        """source (B, 3 + T): `RoundState.report` on the device; count: maximum number of reports under way."""
        self.source = source
        self.buffers = [torch.empty(source.shape, dtype=source.dtype, pin_memory=not on_host) for _ in range(count)]
        self.arrivals = [None if on_host else torch.cuda.Event() for _ in range(count)]
        self.sent = self.read = 0

    def send(self) -> None:
        """Launch a copy of the report, to run after all work launched so far."""
        assert self.sent - self.read < len(self.buffers), (self.sent, self.read)
        index = self.sent % len(self.buffers)
        self.buffers[index].copy_(self.source, non_blocking=True)
        arrival = self.arrivals[index]
        if arrival is not None:
            arrival.record()
        self.sent += 1

    def receive(self) -> list[Report]:
        """Wait for the oldest unread copy, and return its report for every row."""
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


class StopStringMatcher:
    """Search for the first token that completes a stop string in the text of an output.

    The output ends with the earliest token i such that the decoded text of tokens 0 .. i contains one of the strings
    (the prompt does not count, and the token is kept). The search goes token by token, so its result depends only on
    the tokens and not on how many of them a round emitted. Only the last tokens are decoded each time: a character
    takes at most 4 byte tokens.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.stops = tuple(stops)
        self.tokenizer = tokenizer
        self.reach = 4 * max(map(len, stops)) + SLACK
        self.searched = 0

    def find(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens that the output keeps, or None if no stop string is complete. Call it with all
        tokens so far each time that new ones arrive; only the new ones are searched."""
        for end in range(self.searched + 1, len(tokens) + 1):
            tail = list(islice(tokens, max(0, end - self.reach), end))
            text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if any(stop in text for stop in self.stops):
                return end
        self.searched = len(tokens)
        return None


@dataclass
class RequestState:
    """State of one request on the host, from its prompt's pass to its end."""

    index: int
    """Index of the request in the call to `Engine.generate`."""
    request: Request
    first_round: int
    """Number of rounds of the whole batch before this request's first."""
    stops: StopStringMatcher | None
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    """True if a stop string or the callback ended the request."""

    def __post_init__(self) -> None:
        self.most_cached_tokens = len(self.request.prompt)
        """Upper bound on the tokens in the row's cache after all launched rounds."""
        self.most_tokens_left = self.request.max_new_tokens - 1
        """Upper bound on the tokens to come after all launched rounds, each of which emits at least one."""

    @property
    def limit(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return len(self.request.prompt) + self.request.max_new_tokens

    def launch(self, M: int) -> None:
        """Count one more launched round, which emits at most M tokens."""
        self.most_cached_tokens = min(self.most_cached_tokens + M, self.limit)
        self.most_tokens_left -= 1

    def update(self, report: Report, under_way: int, M: int) -> list[int]:
        """Add a report, after which `under_way` more rounds were launched. Return the new tokens."""
        before = len(self.tokens)
        self.most_tokens_left = self.request.max_new_tokens - report.output_length - under_way
        self.most_cached_tokens = min(report.length + M * under_way, self.limit)
        self.tokens += report.tail[len(report.tail) - (report.output_length - before) :]
        stop_at = self.stops.find(self.tokens) if self.stops is not None else None
        if stop_at is not None:
            del self.tokens[stop_at:]
            self.stopped = True
        return self.tokens[before:]

    def output(
        self, accepted: Sequence[int], reached: Sequence[int], copied: list[bool], eos_token_ids: Sequence[int]
    ) -> Output:
        """Return the output of a request that ended. accepted, reached, copied: as in `Output`, for all rounds of the
        row. Rounds after a stop string are dropped."""
        kept_by_round = []
        tested_by_round = []
        left = len(self.tokens) - 1
        for kept, tested in zip(accepted, reached, strict=True):
            if left == 0:
                break
            kept_by_round.append(min(kept, left))
            tested_by_round.append(min(tested, left))
            left -= min(kept + 1, left)
        at_eos = self.tokens[-1] in eos_token_ids and not self.request.ignore_eos
        reason: Literal["eos", "stop", "length"] = "eos" if at_eos else "stop" if self.stopped else "length"
        start = len(self.request.prompt)
        copied = copied[: len(kept_by_round)]
        return Output(self.tokens, reason, kept_by_round, tested_by_round, start, self.first_round, copied)


class Detokenizer:
    """Incremental decoder of tokens to text: the texts it returns, joined, are the text of all tokens.

    A token's text depends on the token before it (some tokenizers drop a leading space), and a character may need up to
    four byte tokens. So each call decodes only the tokens since the last complete character, preceded by the tokens
    of the text returned last.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False) -> None:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        self.decode: Callable[[list[int]], Any] = partial(tokenizer.decode, **options)
        self.known: list[int] = []
        """Tokens whose text was returned last. The text of the next token may depend on them."""
        self.waiting: list[int] = []
        """Tokens whose text was not returned yet."""

    def push(self, token: int) -> str:
        """Add a token. Return the text that it completes; empty if the token ends inside a character."""
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
        if text:  # tokens without text, such as special tokens, are not enough context for the next one
            self.known = self.waiting
            self.waiting = []

    def _rest(self) -> str:
        return str(self.decode(self.known + self.waiting)[len(self.decode(self.known)) :])
