"""Exact decoding of any number of requests, with or without a draft head: the runtime's public interface.

    engine = Engine(target, head, EngineOptions(shape=parse_shape("chain:5"), batch_size=8, max_length=1024))
    outputs = engine.generate([Request(prompt, max_new_tokens=128, sampling=Sampling(temperature=1.0, seed=3)), ...])

Without a head the same code runs plain decoding: the baseline of every speedup and the reference of every audit. The
output of a request depends only on the request, not on its row, the other rows or how often the host polls. Under the
rule `match` it does not depend on the head or the tree either. The other rules (`eval.runtime.sampling_params`) produce
different samples from the same distribution.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase

from eval.runtime.acceptance_rules import make_rule
from eval.runtime.distribution import RowSampling
from eval.runtime.graph import CudaCapture, Rounds
from eval.runtime.memory import check_memory
from eval.runtime.open_decoder import open_decoder
from eval.runtime.request import Output as Output
from eval.runtime.request import Reports, RequestState, StopStringMatcher, check_request
from eval.runtime.request import Request as Request
from eval.runtime.round import Decoder, read_prompts
from eval.runtime.round_state import Commit, RoundState
from eval.runtime.sampling_params import Sampling as Sampling
from eval.runtime.sampling_params import check_rule
from heads.core.contract import Drafter
from heads.core.errors import UserError, warn_once
from heads.core.tree import ROOT_ONLY, TreeShape
from heads.kernels.slots import round_up
from heads.targets.cached_decoder import CacheSpec
from heads.targets.frozen_target import FrozenTarget

PHASES = ("draft", "verify", "accept", "commit")
UNAPPLIED = (
    *("no_repeat_ngram_size", "typical_p", "epsilon_cutoff", "eta_cutoff", "bad_words_ids", "sequence_bias"),
    "suppress_tokens",
)
"""Settings of a generation config that change the distribution in ways that are not supported here."""
OnTokens = Callable[[int, list[int]], bool | None]
"""Callback that receives a request's index and its new tokens, which are final. If it returns True, the request ends
with these tokens."""


@dataclass
class Timings:
    """Times of one call of `Engine.generate`."""

    decode_seconds: float = 0.0
    round_seconds: list[float] = field(default_factory=list)
    """Seconds of each round of the whole batch. Rounds between two polls by the host share their time evenly."""

    @property
    def rounds(self) -> int:
        return len(self.round_seconds)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    shape: TreeShape = ROOT_ONLY
    """Shape of the draft trees; the root alone without a head."""
    rule: str = "match"
    """Acceptance rule, one of `eval.runtime.sampling_params.RULES`."""
    batch_size: int = 1
    max_length: int
    """Number of slots of one sequence: prompt, output and the tree of a round together."""

    def check(self, target: FrozenTarget, head: Drafter | None) -> None:
        """Raise UserError if this target and head cannot decode with these options."""
        if target.placement != "whole":
            raise UserError(
                f"{target.name}: cannot decode here: its decoder layers are {target.placement}; load it whole"
            )
        if not 1 <= self.max_length <= target.context_length:
            raise UserError(
                f"max_length: expected 1 to {target.context_length}, the context of {target.name}, "
                f"got {self.max_length}"
            )
        assert (head is None) == (self.shape.nodes == 1), f"tree '{self.shape}' with head {head}"
        if head is None and self.rule != "match":
            raise UserError(f"rule {self.rule} judges drafts, and plain decoding has none; leave it out")
        check_rule(self.rule, self.shape)
        target.check_shape(self.shape)


class Engine:
    """Decoder of any number of requests with one target, at most one head, one tree shape and one batch size."""

    def __init__(
        self,
        target: FrozenTarget,
        head: Drafter | None,
        options: EngineOptions,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """`tokenizer`: needed only for stop strings."""
        options.check(target, head)
        self.target = target
        self.head = head
        self.options = options
        self.tokenizer = tokenizer
        asked = {name: getattr(target.model.generation_config, name, None) for name in UNAPPLIED}
        if rest := [f"{name} {value}" for name, value in asked.items() if value not in (None, 0, 1)]:
            warn_once(f"{target.name}: its generation_config.json asks for {', '.join(rest)}: not applied here")
        self.shape = options.shape
        """Shape of the largest draft of a round."""
        if head is not None and options.rule == "match":  # under others a text depends on the lengths of its drafts
            self.shape = head.longest(options.shape, options.batch_size)
        self.nodes = self.shape.nodes
        self.on_host = on_host = target.device.type != "cuda"
        self.timings = Timings()
        if not on_host:  # kernels are launched on the current device, whatever the device of their tensors
            torch.cuda.set_device(target.device)
        with torch.inference_mode():
            self.decoder = self._build()
        self.rounds = Rounds(self.decoder, None if on_host else CudaCapture(target.device))
        self.ahead = 0 if on_host else 1
        """Number of launches that may be unread while the host launches more rounds."""
        self.reports = Reports(self.decoder.state.report, self.ahead + 2, on_host=on_host)
        self.launched: deque[tuple[bool, list[RequestState | None]]] = deque()
        """Launches not yet read by the host: whether it is a round, not a prefill, and the request in each row."""
        self.last_read = 0.0
        """Time at which the host read the last report."""

    def _build(self) -> Decoder:
        target = self.target
        head = self.head
        options = self.options
        device = self.target.device
        if self.on_host:
            check_memory(target, options.batch_size, options.max_length, nodes=self.nodes, drafts=head is not None)
        spec = CacheSpec(
            batch_size=options.batch_size,
            capacity=round_up(options.max_length),
            aux_layer_ids=head.aux_layer_ids if head is not None else (),
            nodes=self.nodes,
        )
        decoder = open_decoder(target, spec)
        head_state = None
        if head is not None:
            head_state = head.new_state(
                target.shared, batch_size=options.batch_size, capacity=spec.capacity, shape=options.shape
            )
        sampling = RowSampling(options.batch_size, device, target.vocab_size, target.start_token)
        state = RoundState.new(
            batch_size=options.batch_size,
            capacity=options.max_length,
            depth=self.shape.depth,
            device=device,
        )
        eos = torch.tensor(target.eos_token_ids, dtype=torch.int64, device=device)
        return Decoder(
            target=decoder,
            shape=self.shape,
            head=head,
            head_state=head_state,
            sampling=sampling,
            rule=make_rule(options.rule, self.shape, sampling, decoder),
            state=state,
            update=Commit(state, eos, self.shape.depth),
            zeros=torch.zeros(options.batch_size, 1, dtype=torch.int64, device=device),
        )

    def generate(self, requests: Iterable[Request], *, on_tokens: OnTokens | None = None) -> list[Output]:
        """Decode the requests, `batch_size` at a time. A row whose request ends takes the next one. Return the outputs
        in the order of the requests. Requests in a sequence are all checked before the first is decoded; those of an
        iterator are taken from it, and checked, when a row is free."""
        if isinstance(requests, Sequence):
            for index, request in enumerate(requests):
                self._check(index, request)
        self.timings = Timings()
        with torch.inference_mode():
            return self._generate(iter(requests), on_tokens)

    def _check(self, index: int, request: Request) -> None:
        can_stop = self.tokenizer is not None
        slots = self.options.max_length
        check_request(request, f"request {index}", target=self.target, slots=slots, nodes=self.nodes, can_stop=can_stop)

    def _generate(self, requests: Iterator[Request], on_tokens: OnTokens | None) -> list[Output]:
        waiting = True
        request_states: list[RequestState | None] = [None] * self.options.batch_size
        outputs: list[Output | None] = []
        self.decoder.state.done.fill_(True)
        while True:
            free = [row for row in range(self.options.batch_size) if request_states[row] is None]
            running = waiting and free and not self.launched
            if running:
                taken = [*enumerate(islice(requests, len(free)), start=len(outputs))]
                waiting = len(taken) == len(free)
                for index, request in taken:
                    self._check(index, request)
                    outputs.append(None)
                if not taken:
                    continue
                new_requests = dict(zip(free, taken, strict=False))
                for row, request_state in self._prefill(new_requests).items():
                    request_states[row] = request_state
            elif len(free) == self.options.batch_size and not self.launched:
                break
            elif not (waiting and free):
                self._decode(request_states)
            # The host reads reports until it can launch rounds ahead of them: no new request waits, and some text goes
            # on.
            while self.launched and (
                running
                or len(self.launched) > self.ahead
                or (waiting and None in request_states)
                or not any(state is not None and state.most_tokens_left > 0 for state in request_states)
            ):
                for row, (index, output) in self._read_report(request_states, on_tokens).items():
                    outputs[index] = output
                    request_states[row] = None
        return [output for output in outputs if output is not None]

    def _decode(self, request_states: list[RequestState | None]) -> None:
        """Launch a round, unless the launched ones are as many as the row with most tokens left can need: each emits at
        least one token."""
        running = [state for state in request_states if state is not None]
        if max((state.most_tokens_left for state in running), default=0) <= 0:
            return
        if not self.launched:
            self.last_read = self._moment()
        longest = max(state.most_cached_tokens for state in running)
        extent = min(round_up(longest + self.nodes), self.decoder.target.spec.capacity)
        for state in running:
            state.launch(self.shape.depth + 1)
        self.rounds(extent)
        self._launch(True, request_states)

    def _launch(self, is_round: bool, request_states: list[RequestState | None]) -> None:
        self.reports.send()
        self.launched.append((is_round, list(request_states)))

    def clock(self) -> float:
        """Wait for the device to finish. Return the time in seconds."""
        if not self.on_host:
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _moment(self) -> float:
        """Return the time in seconds. Wait for the device only if the host does not run ahead of it."""
        return time.perf_counter() if self.ahead else self.clock()

    def _prefill(self, new_requests: dict[int, tuple[int, Request]]) -> dict[int, RequestState]:
        read_prompts(self.decoder, {row: request for row, (_, request) in new_requests.items()})
        request_states = {}
        for row, (index, request) in new_requests.items():
            stops = None
            if request.stop and self.tokenizer is not None:
                stops = StopStringMatcher(request.stop, self.tokenizer)
            request_states[row] = RequestState(index, request, self.timings.rounds, stops)
        self.decoder.update.write_report()
        self._launch(False, [request_states.get(row) for row in range(self.options.batch_size)])
        return request_states

    def _read_report(
        self, request_states: list[RequestState | None], on_tokens: OnTokens | None
    ) -> dict[int, tuple[int, Output]]:
        """Read the oldest unread report. Return the request's index and output for each row that ended."""
        is_round, requests_in_rows = self.launched.popleft()
        reports = self.reports.receive()
        is_current = [
            then is not None and then is now for then, now in zip(requests_in_rows, request_states, strict=True)
        ]
        if is_round and any(is_current):  # else the round was launched after every text had ended
            now = self._moment()
            self.timings.round_seconds.append(now - self.last_read)
            self.timings.decode_seconds += now - self.last_read
            self.last_read = now
        under_way = sum(is_round for is_round, _ in self.launched)
        state = self.decoder.state
        M = self.shape.depth + 1
        ended: dict[int, tuple[int, Output]] = {}
        for row, (request_state, report) in enumerate(zip(requests_in_rows, reports, strict=True)):
            if request_state is None or not is_current[row]:  # that request has ended already
                continue
            new_tokens = request_state.update(report, under_way, M)
            if on_tokens is not None and new_tokens and on_tokens(request_state.index, new_tokens):
                request_state.stopped = True
            if request_state.stopped:
                state.done[row] = True
            if report.done or request_state.stopped:
                ended[row] = request_state.index, self._output(row, request_state)
                self.decoder.sampling.set_row(row, Sampling())  # or rounds would stay in the form that it needed
                # An empty row still takes part in rounds. With length 0 it never needs more slots than the other rows.
                state.length[row] = 0
        return ended

    def _output(self, row: int, request_state: RequestState) -> Output:
        state = self.decoder.state
        rounds = int(state.rounds[row])
        if self.shape.depth == 0:
            return request_state.output([0] * rounds, [0] * rounds, [False] * rounds, self.target.eos_token_ids)
        accepted, reached, copied = (
            record[row, :rounds].tolist() for record in (state.accepted, state.reached, state.copied)
        )
        return request_state.output(accepted, reached, copied, self.target.eos_token_ids)
