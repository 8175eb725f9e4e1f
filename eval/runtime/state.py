"""What a batch has decided, and how a round's outcome is taken into it.

Some thirty tensor operations on a few integers cost their dispatch, or their launches. So on a CPU with a C compiler it
is one call of `state.c`, and on a GPU one kernel (`eval.runtime.kernels.settle`); the operations say what both do.

Letters: B rows, N nodes, K depth, M = K + 1 tokens a round can emit, T tokens of a report.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from eval.runtime.kernels.settle import settle
from heads.kernels.backend import runs_kernels
from heads.native.compiling import compiled

SOURCE = Path(__file__).with_name("state.c")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True)
class RoundState:
    """What a batch has decided so far."""

    length: Tensor  # (B,) int64, tokens in the target's cache
    root: Tensor  # (B,) int64
    done: Tensor  # (B,) bool; rows without a request are done
    limit: Tensor  # (B,) int64, most tokens to emit
    heeds_eos: Tensor  # (B,) bool
    output: Tensor  # (B, capacity) int64, tokens emitted, the root included; junk after output_length
    output_length: Tensor  # (B,) int64
    rounds: Tensor  # (B,) int64, rounds the row took part in
    accepted: Tensor  # (B, capacity) int64, by round: drafted tokens that the output took
    reached: Tensor  # (B, capacity) int64, by round: the deepest level put to the test, all levels above it accepted
    report: Tensor  # (B, 3 + T) int64: done, output_length, length and the last T tokens, as the last round left them

    @classmethod
    def new(cls, *, batch_size: int, capacity: int, depth: int, device: torch.device, rounds: int = 1) -> "RoundState":
        """Rows without requests; `capacity` is the most tokens a request emits; a report shows the tokens of `rounds`
        rounds."""
        B, M = batch_size, depth + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            length=zeros(B),
            root=zeros(B),
            done=~zeros(B, dtype=torch.bool),
            limit=zeros(B),
            heeds_eos=zeros(B, dtype=torch.bool),
            output=zeros(B, capacity + M),
            output_length=zeros(B),
            rounds=zeros(B),
            accepted=zeros(B, capacity + 1),
            reached=zeros(B, capacity + 1),
            report=zeros(B, 3 + min(M * rounds, capacity)),
        )


@dataclass(frozen=True)
class Settled:
    """What became known in a round; stands until the next."""

    tokens: Tensor  # (B, M + 1) int64, the root before the round, then what was emitted
    start: Tensor  # (B,) int64, tokens in the target's cache before it
    count: Tensor  # (B,) int64, tokens that came into it; 0 in rows that are done


class StateStruct(ctypes.Structure):
    """`State` of state.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("length", "root", "limit", "output", "output_length", "rounds", "accepted")),
        *((name, _POINTER) for name in ("reached", "report", "done", "heeds_eos", "eos", "tokens", "start", "count")),
        *((name, _INT) for name in ("B", "M", "num_eos", "output_width", "record_width", "report_width")),
    )


@cache
def load() -> ctypes.CDLL | None:
    """The compiled function; None where there is no compiler."""
    library = compiled(SOURCE)
    if library is not None:
        library.settle.argtypes, library.settle.restype = [*[_POINTER] * 4, _INT], None
    return library


class Settlement:
    """Takes the outcome of rounds of one depth into a state."""

    def __init__(self, state: RoundState, eos: Tensor, depth: int) -> None:
        """eos (any number of them,) int64."""
        B, M, device = len(state.done), depth + 1, state.done.device
        self.state, self.eos, self.depth = state, eos, depth
        self.places = torch.arange(M, device=device)
        self.shown = torch.arange(state.report.shape[1] - 3, device=device)
        tokens, (start, count) = state.output.new_zeros(B, M + 1), state.output.new_zeros(2, B)
        self.settled = Settled(tokens, start, count)
        self.by_kernel = runs_kernels(state.output)
        self.library = load() if device.type == "cpu" and not self.by_kernel else None
        if self.library is None:
            return
        where = (
            *(state.length, state.root, state.limit, state.output, state.output_length, state.rounds, state.accepted),
            *(state.reached, state.report, state.done, state.heeds_eos, eos, tokens, start, count),
        )
        assert all(tensor.is_contiguous() for tensor in where)
        self.struct = StateStruct(
            *(tensor.data_ptr() for tensor in where),
            *(B, M, len(eos), state.output.shape[1], state.accepted.shape[1], state.report.shape[1]),
        )

    def __call__(self, accepted: Tensor, emitted: Tensor, depths: Tensor | None) -> Settled:
        """Take the accepted tokens into the state, cut at EOS and at the limit.

        accepted (B,), emitted (B, M): as in `Acceptance`; depths (B, N): of each tree's nodes, None where all trees
        have K levels.
        """
        if self.by_kernel:
            settle(self.state, self.eos, self.settled, accepted, emitted, depths)
            return self.settled
        if self.library is None:
            return self.in_tensors(accepted, emitted, depths)
        held = accepted.contiguous(), emitted.contiguous(), None if depths is None else depths.contiguous()
        where = (None if tensor is None else tensor.data_ptr() for tensor in held)
        self.library.settle(ctypes.addressof(self.struct), *where, 0 if depths is None else depths.shape[1])
        return self.settled

    def in_tensors(self, accepted: Tensor, emitted: Tensor, depths: Tensor | None) -> Settled:
        """The same by tensor operations, on any device."""
        state, count = self.state, accepted + 1
        kept, ended = self.cut(emitted, count)
        active = ~state.done
        kept = kept * active
        state.done.logical_or_(ended)
        settled = Settled(
            torch.cat([state.root[:, None], emitted], dim=1), state.length.clone(), torch.where(state.done, 0, count)
        )
        if self.depth > 0:
            self.record(accepted, kept, depths)
        state.output.scatter_(1, state.output_length[:, None] + self.places, emitted)
        state.output_length.add_(kept)
        state.rounds.add_(active)
        state.length.add_(settled.count)
        # A row that is done may take any root: it is never read.
        state.root.copy_(emitted.gather(1, accepted[:, None])[:, 0])
        self.publish()
        return settled

    def cut(self, emitted: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the first count[b] tokens the output keeps, and whether it ends with them; (B,) each."""
        state = self.state
        room = state.limit - state.output_length
        kept = torch.minimum(count, room)
        ended = count >= room
        if len(self.eos):
            M = emitted.shape[1]
            is_eos = (emitted[..., None] == self.eos).any(dim=-1) & state.heeds_eos[:, None]  # (B, M)
            upto_eos = torch.where(is_eos, self.places + 1, M + 1).amin(dim=1)
            ended = ended | (upto_eos <= kept)
            kept = torch.minimum(kept, upto_eos)
        return kept, ended

    def record(self, accepted: Tensor, kept: Tensor, depths: Tensor | None) -> None:
        """Note how deep the round came; one that the output's end cuts short tests only the levels the output shows."""
        state = self.state
        at, tested = state.rounds[:, None], torch.minimum(accepted + 1, kept)
        state.accepted.scatter_(1, at, torch.minimum(accepted, kept)[:, None])
        levels = self.depth if depths is None else depths.amax(dim=1)
        state.reached.scatter_(1, at, tested.clamp(max=levels)[:, None])

    def publish(self) -> None:
        """Write the report."""
        state = self.state
        place = (state.output_length[:, None] - len(self.shown) + self.shown).clamp_min(0)
        facts = [state.done.long()[:, None], state.output_length[:, None], state.length[:, None]]
        state.report.copy_(torch.cat([*facts, state.output.gather(1, place)], dim=1))
