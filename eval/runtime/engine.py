"""Exact decoding of any number of requests, with or without a draft head: the face of the runtime.

    engine = Engine(target, head, shape=parse_shape("chain:5"), batch_size=8, max_length=1024)
    outputs = engine.generate([Request(prompt, max_new_tokens=128, sampling=Sampling(temperature=1.0, seed=3)), ...])

Without a head the same code decodes plainly: the baseline of every speedup and the reference of every audit. What a
request gives depends on the request alone, not on its row, its neighbours or how often the host looks, and under the
rule `match` not on the head or the tree either. Other rules (`eval.runtime.rules`) give other draws of the same law.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from eval.runtime.controller import check_adaptive
from eval.runtime.hf import open_step
from eval.runtime.ladder import Ladder
from eval.runtime.prefill import read_prompts
from eval.runtime.request import Output as Output
from eval.runtime.request import Request as Request
from eval.runtime.round import Decoder, RoundState
from eval.runtime.rules import check_rule, make_rule
from eval.runtime.sampling import RowSampling
from eval.runtime.sampling import Sampling as Sampling
from eval.runtime.stops import StopWatch
from heads.base import Drafter
from heads.cache import round_up
from heads.errors import UserError
from heads.target import FrozenTarget
from heads.tree import ROOT_ONLY, TreeShape

PHASES = ("draft", "verify", "accept", "commit")
OnTokens = Callable[[int, list[int]], None]
"""Called with a request's index and the tokens newly decided for it; they are never taken back."""


@dataclass
class Timings:
    """Where the time of one `generate` went."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    round_seconds: list[float] = field(default_factory=list)
    """Of each round of the whole batch; rounds between two looks of the host share their time evenly."""
    breakdown: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds by phase; measured only under `Engine.profile`, which waits for the device after each. The head's
    reading of accepted features is part of committing."""
    rungs: Counter[str] = field(default_factory=Counter)
    """Rounds of the whole batch by their draft, where it is adaptive."""

    @property
    def rounds(self) -> int:
        """Rounds of the whole batch."""
        return len(self.round_seconds)


@dataclass
class Seat:
    """A row of the batch and the request that holds it."""

    index: int
    request: Request
    prefill_seconds: float
    first_round: int
    """Rounds of the whole batch before its own first."""
    most_tokens: int
    """At most this many tokens stand in the row's cache; exact whenever the host looks."""
    left: int
    """Tokens it may still get; exact likewise."""
    watch: StopWatch | None
    tokens: list[int] = field(default_factory=list)


class Engine:
    """One target, one head or none, one tree shape and one batch size, over any number of requests."""

    def __init__(
        self,
        target: FrozenTarget,
        head: Drafter | None = None,
        *,
        shape: TreeShape = ROOT_ONLY,
        batch_size: int = 1,
        max_length: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        poll_interval: int | None = None,
        rule: str = "match",
        native: bool = True,
        adaptive: bool = False,
    ) -> None:
        """`max_length`: the most slots one sequence takes, prompt, output and the tree under test together.
        `tokenizer`: needed for stop strings only. `poll_interval`: rounds between the host's looks, by default 1 on a
        CPU, where looking is free, else 4. `rule`: one of `eval.runtime.rules.RULES`, by which drafts are accepted.
        `native`: whether the target's native decoder is used where it has one. `adaptive`: whether drafts are
        shortened, or left out, while that is faster (`eval.runtime.controller`); what was found holds for later calls
        too."""
        if batch_size < 1:
            raise UserError(f"batch size: expected at least 1, got {batch_size}")
        if not 1 <= max_length <= target.context_length:
            raise UserError(
                f"max_length: expected 1 to {target.context_length}, the context of {target.name}, got {max_length}"
            )
        if (head is None) != (shape.nodes == 1):
            raise UserError(
                f"a head and a tree go together: got {'no ' if head is None else 'a '}head and tree '{shape}'"
            )
        if head is None and rule != "match":
            raise UserError(f"rule {rule} judges drafts, and plain decoding has none; leave it out")
        check_rule(rule, shape)
        if adaptive:
            if head is None:
                raise UserError("adaptive drafts need a head, and plain decoding has none; leave it out")
            check_adaptive(rule)
        self.target, self.head, self.shape, self.rule = target, head, shape, rule
        self.batch_size, self.max_length = batch_size, max_length
        self.tokenizer, self.native = tokenizer, native
        self.poll_interval = poll_interval or (1 if target.device.type == "cpu" else 4)
        self.profile = False
        self.timings = Timings()
        with torch.inference_mode():
            self.decoder = self._build()
            self.ladder = Ladder(self.decoder) if adaptive else None

    def _build(self) -> Decoder:
        target, head, device = self.target, self.head, self.target.device
        taps = head.taps if head is not None else ()
        step = open_step(target, batch_size=self.batch_size, capacity=self.max_length, taps=taps, native=self.native)
        head_state = None
        if head is not None:
            head_state = head.new_state(
                target.ends, batch_size=self.batch_size, capacity=step.capacity, shape=self.shape
            )
        sampling = RowSampling(self.batch_size, device)
        return Decoder(
            step=step,
            shape=self.shape,
            head=head,
            head_state=head_state,
            sampling=sampling,
            rule=make_rule(self.rule, self.shape, sampling, device),
            eos=torch.tensor(target.eos_token_ids, dtype=torch.int64, device=device),
            state=RoundState.new(
                batch_size=self.batch_size, capacity=self.max_length, depth=self.shape.depth, device=device
            ),
            zeros=torch.zeros(self.batch_size, 1, dtype=torch.int64, device=device),
            places=torch.arange(self.shape.depth + 1, device=device),
        )

    def generate(self, requests: Sequence[Request], *, on_tokens: OnTokens | None = None) -> list[Output]:
        """Decode the requests, `batch_size` at a time; a row that ends goes to the next request. Outputs are in order
        of requests."""
        for index, request in enumerate(requests):
            self._check(index, request)
        self.timings = Timings()
        with torch.inference_mode():
            return self._generate(requests, on_tokens)

    def _check(self, index: int, request: Request) -> None:
        prompt, nodes = len(request.prompt), self.shape.nodes
        if prompt == 0:
            raise UserError(f"request {index}: the prompt is empty; expected at least one token")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.target.vocab_size:
            raise UserError(f"request {index}: the prompt has token ids outside 0 .. {self.target.vocab_size - 1}")
        start = self.target.start_token
        if start is not None and start not in request.prompt[1:]:
            raise UserError(
                f"request {index}: the prompt of an encoder-decoder is its encoder's input, then its start token "
                f"{start}, which begins the answer; a chat template puts it there"
            )
        if request.max_new_tokens < 1:
            raise UserError(f"request {index}: max_new_tokens must be at least 1, got {request.max_new_tokens}")
        needed = prompt + request.max_new_tokens + nodes
        if needed > self.max_length:
            raise UserError(
                f"request {index}: a prompt of {prompt} tokens, {request.max_new_tokens} new ones and "
                f"a tree of {nodes} need {needed} slots, but there are {self.max_length}; "
                "shorten the prompt, ask for fewer tokens or raise max_length"
            )
        if request.stop and self.tokenizer is None:
            raise UserError(f"request {index}: stop strings need a tokenizer; give the engine one")
        if not all(request.stop):
            raise UserError(f"request {index}: an empty stop string would end every output; leave it out")

    def _generate(self, requests: Sequence[Request], on_tokens: OnTokens | None) -> list[Output]:
        waiting = deque(enumerate(requests))
        seats: list[Seat | None] = [None] * self.batch_size
        outputs: list[Output | None] = [None] * len(requests)
        self.decoder.state.done.fill_(True)
        while True:
            free = [row for row in range(self.batch_size) if seats[row] is None]
            if waiting and free:
                newcomers = {row: waiting.popleft() for row in free[: len(waiting)]}
                for row, newcomer in self._prefill(newcomers).items():
                    seats[row] = newcomer
            elif len(free) == self.batch_size:
                break
            else:
                self._decode(seats)
            for row, (index, output) in self._look(seats, on_tokens).items():
                outputs[index], seats[row] = output, None
        return [output for output in outputs if output is not None]

    def _decode(self, seats: list[Seat | None]) -> None:
        """Run rounds until the host looks again; none that every row must have ended before, as each gives a token."""
        rounds = min(self.poll_interval, max(seat.left for seat in seats if seat is not None))
        started = self._clock()
        decoder = self.ladder.begin() if self.ladder is not None else self.decoder
        M, N = decoder.shape.depth + 1, decoder.shape.nodes
        for _ in range(rounds):
            most = 0
            for seat in seats:
                if seat is not None:
                    most = max(most, seat.most_tokens)
                    seat.most_tokens = min(seat.most_tokens + M, len(seat.request.prompt) + seat.request.max_new_tokens)
            extent = min(round_up(most + N), decoder.step.capacity)
            if self.profile:
                self._profiled_round(decoder, extent)
            else:
                decoder.round(extent)
        seconds = self._clock() - started
        self.timings.round_seconds += [seconds / rounds] * rounds
        self.timings.decode_seconds += seconds
        if self.ladder is not None:
            self.timings.rungs[self.ladder.end(rounds, seconds)] += rounds

    def _profiled_round(self, decoder: Decoder, extent: int) -> None:
        last = self._clock()

        def mark(phase: str) -> None:
            nonlocal last
            now = self._clock()
            self.timings.breakdown[phase] += now - last
            last = now

        decoder.round(extent, mark)

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _prefill(self, newcomers: dict[int, tuple[int, Request]]) -> dict[int, Seat]:
        """Seat new requests: their prompts read, their first tokens chosen."""
        started = self._clock()
        decoder = self.ladder.idle if self.ladder is not None else self.decoder
        read_prompts(decoder, {row: request for row, (_, request) in newcomers.items()})
        seconds = (self._clock() - started) / len(newcomers)
        self.timings.prefill_seconds += seconds * len(newcomers)
        seats = {}
        for row, (index, request) in newcomers.items():
            watch = StopWatch(request.stop, self.tokenizer) if request.stop and self.tokenizer is not None else None
            rounds = self.timings.rounds
            seats[row] = Seat(index, request, seconds, rounds, len(request.prompt), request.max_new_tokens - 1, watch)
        return seats

    def _look(self, seats: list[Seat | None], on_tokens: OnTokens | None) -> dict[int, tuple[int, Output]]:
        """Read what the device has decided; -> the outputs of the rows that ended."""
        state = self.decoder.state
        ended: dict[int, tuple[int, Output]] = {}
        seen = torch.stack([state.done.long(), state.output_length, state.length]).tolist()
        for row, seat in enumerate(seats):
            if seat is None:
                continue
            done, count = bool(seen[0][row]), seen[1][row]
            seat.most_tokens, seat.left = seen[2][row], seat.request.max_new_tokens - count
            if not (done or on_tokens is not None or seat.watch is not None):
                continue
            fresh = state.output[row, len(seat.tokens) : count].tolist()
            before = len(seat.tokens)
            seat.tokens += fresh
            stop_at = seat.watch.find(seat.tokens) if seat.watch is not None else None
            if stop_at is not None:
                del seat.tokens[stop_at:]
                state.done[row] = True
            if on_tokens is not None and len(seat.tokens) > before:
                on_tokens(seat.index, seat.tokens[before:])
            if done or stop_at is not None:
                ended[row] = seat.index, self._output(row, seat, stopped=stop_at is not None)
                # An empty row still takes part in rounds; at slot 0 it never asks for more slots than the others show.
                state.length[row] = 0
        return ended

    def _output(self, row: int, seat: Seat, *, stopped: bool) -> Output:
        """A finished row's record; rounds that a stop string left behind are not in it."""
        state, K = self.decoder.state, self.shape.depth
        rounds = int(state.rounds[row])
        made = [0] * rounds, [0] * rounds
        if K:
            made = state.accepted[row, :rounds].tolist(), state.reached[row, :rounds].tolist()
        accepted, reached, left = [], [], len(seat.tokens) - 1
        for kept, tested in zip(*made, strict=True):
            if left == 0:
                break
            accepted.append(min(kept, left))
            reached.append(min(tested, left))
            left -= min(kept + 1, left)
        last = seat.tokens[-1]
        at_eos = last in self.target.eos_token_ids and not seat.request.ignore_eos
        reason: Literal["eos", "stop", "length"] = "eos" if at_eos else "stop" if stopped else "length"
        return Output(seat.tokens, reason, len(accepted), accepted, reached, seat.prefill_seconds, seat.first_round)
