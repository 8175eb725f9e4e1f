"""Commit of a round's result to the state of all rows, in one call of C."""

import ctypes

from torch import Tensor

from heads.backends.cpu.library import STRUCTS, loaded
from heads.backends.torch.commit import Commit, CommitResult, RoundState


class CpuCommit(Commit):
    """`Commit` that calls the compiled function."""

    def __init__(self, state: RoundState, eos: Tensor, depth: int) -> None:
        super().__init__(state, eos, depth)
        self.library, result = loaded(), self.result
        self.held = (
            *(state.length, state.root, state.limit, state.output, state.output_length, state.rounds, state.accepted),
            *(state.reached, state.report, state.done, state.stops_at_eos, eos),
            *(result.tokens, result.start, result.count),
        )
        assert all(tensor.is_contiguous() for tensor in self.held)
        self.struct = STRUCTS["State"](
            *(tensor.data_ptr() for tensor in self.held),
            *(len(state.done), depth + 1, len(eos)),
            *(state.output.shape[1], state.accepted.shape[1], state.report.shape[1]),
        )

    def __call__(self, accepted: Tensor, emitted: Tensor, depths: Tensor | None) -> CommitResult:
        held = accepted.contiguous(), emitted.contiguous(), None if depths is None else depths.contiguous()
        where = (None if tensor is None else tensor.data_ptr() for tensor in held)
        self.library.commit(ctypes.addressof(self.struct), *where, 0 if depths is None else depths.shape[1])
        return self.result
