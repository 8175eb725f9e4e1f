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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from eval.runtime.commit import Commit, RoundState
from eval.runtime.distribution import RowSampling
from eval.runtime.graph import CudaCapture, Rounds
from eval.runtime.memory import check_memory, free_bytes, row_bytes
from eval.runtime.request import Output as Output
from eval.runtime.request import Reports, RequestState, StopWatch, check_request
from eval.runtime.request import Request as Request
from eval.runtime.round import Decoder, read_prompts
from eval.runtime.rules import make_rule
from eval.runtime.sampling_params import Sampling as Sampling
from eval.runtime.sampling_params import check_rule
from eval.runtime.self_check import open_step
from heads.core.contract import Drafter
from heads.core.errors import UserError
from heads.core.tree import ROOT_ONLY, TreeShape
from heads.targets.cached_decoder import CacheSpec
from heads.targets.model import FrozenTarget
from heads.targets.slots import round_up

PHASES = ("draft", "verify", "accept", "commit")
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
    pinned: int = 1
    """Number of nodes of a plain step. All but the root are padding, so that its products have the shapes of a round
    with that many nodes. Drafts must repeat such steps bit for bit (`eval.runtime.identity`)."""

    def check(self, target: FrozenTarget, head: Drafter | None) -> None:
        """Raise UserError if this target and head cannot decode with these options."""
        if target.placement != "whole":
            raise UserError(
                f"{target.name}: cannot decode here: its decoder layers are {target.placement}; load it whole"
            )
        if self.batch_size < 1:
            raise UserError(f"batch size: expected at least 1, got {self.batch_size}")
        if not 1 <= self.max_length <= target.context_length:
            raise UserError(
                f"max_length: expected 1 to {target.context_length}, the context of {target.name}, "
                f"got {self.max_length}"
            )
        if (head is None) != (self.shape.nodes == 1):
            raise UserError(
                f"a head and a tree go together: got {'no ' if head is None else 'a '}head and tree '{self.shape}'"
            )
        if head is None and self.rule != "match":
            raise UserError(f"rule {self.rule} judges drafts, and plain decoding has none; leave it out")
        if self.pinned > 1 and head is not None:
            raise UserError(
                f"pinned: plain decoding in steps of {self.pinned} nodes has no head; leave one of them out"
            )
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
        self.target, self.head, self.options, self.tokenizer = target, head, options, tokenizer
        self.nodes = max(options.shape.nodes, options.pinned)
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
        self.looked = 0.0

    def _build(self) -> Decoder:
        target, head, options, device = self.target, self.head, self.options, self.target.device
        aux_layer_ids = head.aux_layer_ids if head is not None else ()
        per_row = row_bytes(
            target,
            capacity=options.max_length,
            nodes=self.nodes,
            drafts=head is not None,
        )
        if self.on_host:
            check_memory(per_row, options.batch_size, free_bytes(), target.name)
        spec = CacheSpec(
            batch_size=options.batch_size,
            capacity=round_up(options.max_length),
            aux_layer_ids=aux_layer_ids,
            nodes=self.nodes,
        )
        step = open_step(target, spec)
        head_state = None
        if head is not None:
            head_state = head.new_state(
                target.shared,
                batch_size=options.batch_size,
                capacity=step.capacity,
                shape=options.shape,
            )
        sampling = RowSampling(options.batch_size, device)
        state = RoundState.new(
            batch_size=options.batch_size,
            capacity=options.max_length,
            depth=options.shape.depth,
            device=device,
        )
        eos = torch.tensor(target.eos_token_ids, dtype=torch.int64, device=device)
        return Decoder(
            step=step,
            shape=options.shape,
            head=head,
            head_state=head_state,
            sampling=sampling,
            rule=make_rule(options.rule, options.shape, sampling),
            state=state,
            update=Commit(state, eos, options.shape.depth),
            zeros=torch.zeros(options.batch_size, 1, dtype=torch.int64, device=device),
            pinned=self.nodes if head is None else 1,
        )

    def generate(self, requests: Sequence[Request], *, on_tokens: OnTokens | None = None) -> list[Output]:
        """Decode the requests, `batch_size` at a time. A row whose request ends takes the next one. Return the outputs
        in the order of the requests."""
        for index, request in enumerate(requests):
            check_request(
                request,
                f"request {index}",
                target=self.target,
                slots=self.options.max_length,
                nodes=self.nodes,
                can_stop=self.tokenizer is not None,
            )
        self.timings = Timings()
        with torch.inference_mode():
            return self._generate(requests, on_tokens)

    def _generate(self, requests: Sequence[Request], on_tokens: OnTokens | None) -> list[Output]:
        waiting = deque(enumerate(requests))
        request_states: list[RequestState | None] = [None] * self.options.batch_size
        outputs: list[Output | None] = [None] * len(requests)
        self.decoder.state.done.fill_(True)
        while True:
            free = [row for row in range(self.options.batch_size) if request_states[row] is None]
            running = waiting and free and not self.launched
            if running:
                newcomers = {row: waiting.popleft() for row in free[: len(waiting)]}
                for row, newcomer in self._prefill(newcomers).items():
                    request_states[row] = newcomer
            elif len(free) == self.options.batch_size and not self.launched:
                break
            elif not (waiting and free):
                self._decode(request_states)
            # The host reads reports until it can launch rounds ahead of them: no newcomer waits, and some text goes on.
            while self.launched and (
                running
                or len(self.launched) > self.ahead
                or (waiting and None in request_states)
                or not any(state is not None and state.left > 0 for state in request_states)
            ):
                for row, (index, output) in self._look(request_states, on_tokens).items():
                    outputs[index], request_states[row] = output, None
        return [output for output in outputs if output is not None]

    def _decode(self, request_states: list[RequestState | None]) -> None:
        """Launch a round, unless the launched ones are as many as the row with most tokens left can need: each emits at
        least one token."""
        running = [state for state in request_states if state is not None]
        if max((state.left for state in running), default=0) <= 0:
            return
        decoder = self.decoder
        M, N = decoder.shape.depth + 1, max(decoder.shape.nodes, decoder.pinned)
        if not self.launched:
            self.looked = self._moment()
        extent = min(round_up(max(state.most_tokens for state in running) + N), decoder.step.capacity)
        for state in running:
            state.launch(M)
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

    def _prefill(self, newcomers: dict[int, tuple[int, Request]]) -> dict[int, RequestState]:
        read_prompts(self.decoder, {row: request for row, (_, request) in newcomers.items()})
        request_states = {}
        for row, (index, request) in newcomers.items():
            watch = StopWatch(request.stop, self.tokenizer) if request.stop and self.tokenizer is not None else None
            request_states[row] = RequestState(index, request, self.timings.rounds, watch)
        self.decoder.update.publish()
        self._launch(False, [request_states.get(row) for row in range(self.options.batch_size)])
        return request_states

    def _look(
        self, request_states: list[RequestState | None], on_tokens: OnTokens | None
    ) -> dict[int, tuple[int, Output]]:
        """Read the oldest unread report. Return the request's index and output for each row that ended."""
        is_round, sitters = self.launched.popleft()
        reports = self.reports.receive()
        is_current = [own is not None and own is other for own, other in zip(sitters, request_states, strict=True)]
        if is_round and any(is_current):  # else the round was launched after every text had ended
            now = self._moment()
            self.timings.round_seconds.append(now - self.looked)
            self.timings.decode_seconds += now - self.looked
            self.looked = now
        under_way = sum(is_round for is_round, _ in self.launched)
        state, M = self.decoder.state, self.options.shape.depth + 1
        ended: dict[int, tuple[int, Output]] = {}
        for row, (request_state, report) in enumerate(zip(sitters, reports, strict=True)):
            if request_state is None or not is_current[row]:  # that request has ended already
                continue
            fresh = request_state.learn(report, under_way, M)
            if on_tokens is not None and fresh and on_tokens(request_state.index, fresh):
                request_state.stopped = True
            if request_state.stopped:
                state.done[row] = True
            if report.done or request_state.stopped:
                ended[row] = request_state.index, self._output(row, request_state)
                # An empty row still takes part in rounds. With length 0 it never needs more slots than the other rows.
                state.length[row] = 0
        return ended

    def _output(self, row: int, request_state: RequestState) -> Output:
        state = self.decoder.state
        rounds = int(state.rounds[row])
        if self.options.shape.depth == 0:
            return request_state.output([0] * rounds, [0] * rounds, self.target.eos_token_ids)
        accepted, reached = (record[row, :rounds].tolist() for record in (state.accepted, state.reached))
        return request_state.output(accepted, reached, self.target.eos_token_ids)
