"""Exact decoding of any number of requests, with or without a draft head: the face of the runtime.

    engine = Engine(target, head, shape=parse_shape("chain:5"), batch_size=8, max_length=1024)
    outputs = engine.generate([Request(prompt, max_new_tokens=128, sampling=Sampling(temperature=1.0, seed=3)), ...])

Without a head the same code decodes plainly: the baseline of every speedup and the reference of every audit. What a
request gives depends on the request alone, not on the head, the tree, its row, its neighbours or how often the host
looks.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eval.runtime.cache import round_up
from eval.runtime.hf import TargetStep, probe
from eval.runtime.round import Decoder, RoundState
from eval.runtime.sampling import RowSampling, Sampling
from eval.runtime.stops import StopWatch
from heads.base import DraftHead, Observation
from heads.errors import UserError
from heads.target import Features, FrozenTarget
from heads.tree import ROOT_ONLY, TreeShape

PHASES = ("draft", "verify", "accept", "commit")
OnTokens = Callable[[int, list[int]], None]
"""Called with a request's index and the tokens newly decided for it; they are never taken back."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to go on from it."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """The output ends with the first token that completes one of these strings in its text."""
    ignore_eos: bool = False


@dataclass
class Output:
    """What a request gave. The first token comes from the prompt's own pass; rounds made the others."""

    tokens: list[int]
    finish_reason: Literal["eos", "stop", "length"]
    rounds: int
    """Target passes after the prompt's."""
    accepted: list[int]
    """By round: draft tokens in the output. The round's last token is the target's own, but for a last round cut on a
    draft token."""
    reached: list[int]
    """By round: the deepest level put to the test; min(accepted + 1, levels drafted), less where the output's end cut
    the round."""
    prefill_seconds: float

    def drafted(self) -> list[bool]:
        """For every token, whether it was drafted (and accepted) rather than made by the target's own pass."""
        flags = [False]
        for count in self.accepted:
            flags += [True] * count + [False]
        return flags[: len(self.tokens)]


@dataclass
class Timings:
    """Where the time of one `generate` went."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: int = 0
    """Rounds of the whole batch."""
    breakdown: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds by phase; measured only under `Engine.profile`, which waits for the device after each. The head's
    reading of accepted features is part of committing."""


@dataclass
class Seat:
    """A row of the batch and the request that holds it."""

    index: int
    request: Request
    prefill_seconds: float
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
        head: DraftHead | None = None,
        *,
        shape: TreeShape = ROOT_ONLY,
        batch_size: int = 1,
        max_length: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        poll_interval: int | None = None,
    ) -> None:
        """`max_length`: the most slots one sequence takes, prompt, output and the tree under test together.
        `tokenizer`: needed for stop strings only. `poll_interval`: rounds between the host's looks, by default 1 on a
        CPU, where looking is free, else 4."""
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
        self.target, self.head, self.shape = target, head, shape
        self.batch_size, self.max_length = batch_size, max_length
        self.tokenizer = tokenizer
        self.poll_interval = poll_interval or (1 if target.device.type == "cpu" else 4)
        self.profile = False
        self.timings = Timings()
        with torch.inference_mode():
            self.decoder = self._build()

    def _build(self) -> Decoder:
        target, head, device = self.target, self.head, self.target.device
        taps = head.taps if head is not None else ()
        step = TargetStep(target, batch_size=self.batch_size, capacity=self.max_length, taps=taps)
        probe(step)
        head_state = None
        if head is not None:
            head_state = head.new_state(
                target.ends, batch_size=self.batch_size, capacity=step.capacity, shape=self.shape
            )
        return Decoder(
            step=step,
            shape=self.shape,
            head=head,
            head_state=head_state,
            sampling=RowSampling(self.batch_size, device),
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
        M, N = self.shape.depth + 1, self.shape.nodes
        rounds = min(self.poll_interval, max(seat.left for seat in seats if seat is not None))
        started = self._clock()
        for _ in range(rounds):
            most = 0
            for seat in seats:
                if seat is not None:
                    most = max(most, seat.most_tokens)
                    seat.most_tokens = min(seat.most_tokens + M, len(seat.request.prompt) + seat.request.max_new_tokens)
            extent = min(round_up(most + N), self.decoder.step.capacity)
            if self.profile:
                self._profiled_round(extent)
            else:
                self.decoder.round(extent)
        self.timings.rounds += rounds
        self.timings.decode_seconds += self._clock() - started

    def _profiled_round(self, extent: int) -> None:
        last = self._clock()

        def mark(phase: str) -> None:
            nonlocal last
            now = self._clock()
            self.timings.breakdown[phase] += now - last
            last = now

        self.decoder.round(extent, mark)

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _prefill(self, newcomers: dict[int, tuple[int, Request]]) -> dict[int, Seat]:
        """Read the prompts of new requests into their rows and choose each one's first token.

        The target reads one row at a time; the head, which takes a whole batch, reads the chunks of all new rows
        together.
        """
        decoder, device = self.decoder, self.target.device
        started = self._clock()
        fresh = torch.tensor([row in newcomers for row in range(self.batch_size)], device=device)
        if self.head is not None:
            self.head.reset_rows(decoder.head_state, fresh)
        start = 0
        while rows := [row for row, (_, request) in newcomers.items() if len(request.prompt) > start]:
            features, spans = {}, {}
            for row in rows:
                request = newcomers[row][1]
                features[row], spans[row] = self._prefill_chunk(row, request, start)
            if self.head is not None:
                self._observe(features, spans, start)
            start += max(len(span) - 1 for span in spans.values())
        seconds = (self._clock() - started) / len(newcomers)
        self.timings.prefill_seconds += seconds * len(newcomers)
        seats = {}
        for row, (index, request) in newcomers.items():
            watch = StopWatch(request.stop, self.tokenizer) if request.stop and self.tokenizer is not None else None
            seats[row] = Seat(index, request, seconds, len(request.prompt), request.max_new_tokens - 1, watch)
        return seats

    def _prefill_chunk(self, row: int, request: Request, start: int) -> tuple[Features, Tensor]:
        """One row's next chunk; -> its features (1, C, ..), and the tokens from `start` on, one more than the chunk's
        true ones."""
        device, prompt = self.target.device, torch.tensor(request.prompt, dtype=torch.int64)
        C = self.decoder.step.chunk_size(len(prompt) - start)
        chunk = prompt[start : start + C]
        tokens = torch.zeros(1, C, dtype=torch.int64)
        tokens[0, : len(chunk)] = chunk
        features = self.decoder.step.prefill(row, tokens.to(device), start)
        if start + C < len(prompt):
            return features, prompt[start : start + C + 1].to(device)
        root = self._seat(row, request, features.hidden[:, len(chunk) - 1 : len(chunk)])
        return features, torch.cat([chunk.to(device), root])

    def _seat(self, row: int, request: Request, hidden: Tensor) -> Tensor:
        """Choose a request's first token from the hidden state (1, 1, D) of its prompt's last token, and open its
        row. -> (1,)"""
        decoder, state, P = self.decoder, self.decoder.state, len(request.prompt)
        decoder.sampling.set_row(row, request.sampling)
        position = torch.full((1, 1), P, device=hidden.device)
        root = decoder.sampling.row(row).choose(self.target.ends.logits(hidden), position)[0]
        state.length[row] = P
        state.root[row : row + 1] = root
        state.limit[row] = request.max_new_tokens
        state.heeds_eos[row] = not request.ignore_eos
        state.output[row, :1] = root
        state.output_length[row] = 1
        state.rounds[row] = 0
        state.done[row] = request.max_new_tokens == 1
        if not request.ignore_eos:
            state.done[row : row + 1].logical_or_((root == decoder.eos).any())
        return root

    def _observe(self, features: dict[int, Features], spans: dict[int, Tensor], start: int) -> None:
        """Hand the head one chunk of every new row's prompt; the other rows have nothing to learn."""
        assert self.head is not None
        B, M = self.batch_size, max(f.hidden.shape[1] for f in features.values())
        some = next(iter(features.values()))
        tokens = torch.zeros(B, M + 1, dtype=torch.int64, device=self.target.device)
        taps = some.taps.new_zeros(B, M, some.taps.shape[-1])
        hidden = some.hidden.new_zeros(B, M, some.hidden.shape[-1])
        count = torch.zeros(B, dtype=torch.int64, device=self.target.device)
        for row, span in spans.items():
            C = features[row].hidden.shape[1]
            tokens[row, : len(span)] = span
            taps[row, :C], hidden[row, :C] = features[row].taps[0], features[row].hidden[0]
            count[row] = len(span) - 1
        self.head.observe(
            self.decoder.head_state, Observation(tokens, taps, hidden, torch.full_like(count, start), count)
        )

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
        return Output(seat.tokens, reason, len(accepted), accepted, reached, seat.prefill_seconds)
