"""The end of a round in C: its outcome taken into the state of all rows in one call."""

import ctypes
from typing import Self

from torch import Tensor

from heads.backends.cpu.library import StateStruct, load
from heads.backends.round_state import CommitResult, RoundState


class CompiledCommit:
    """`eval.runtime.state.Commit` by the compiled function."""

    def __init__(self, library: ctypes.CDLL, state: RoundState, eos: Tensor, result: CommitResult) -> None:
        self.library = library
        where = (
            *(state.length, state.root, state.limit, state.output, state.output_length, state.rounds, state.accepted),
            *(state.reached, state.report, state.done, state.heeds_eos, eos),
            *(result.tokens, result.start, result.count),
        )
        assert all(tensor.is_contiguous() for tensor in where)
        self.held, (B, tokens) = where, result.tokens.shape
        self.struct = StateStruct(
            *(tensor.data_ptr() for tensor in where),
            *(B, tokens - 1, len(eos), state.output.shape[1], state.accepted.shape[1], state.report.shape[1]),
        )

    @classmethod
    def of(cls, state: RoundState, eos: Tensor, result: CommitResult) -> Self | None:
        """None on other devices, and without a compiler."""
        library = load() if state.done.device.type == "cpu" else None
        return None if library is None else cls(library, state, eos, result)

    def __call__(self, accepted: Tensor, emitted: Tensor, depths: Tensor | None) -> None:
        held = accepted.contiguous(), emitted.contiguous(), None if depths is None else depths.contiguous()
        where = (None if tensor is None else tensor.data_ptr() for tensor in held)
        self.library.commit(ctypes.addressof(self.struct), *where, 0 if depths is None else depths.shape[1])
