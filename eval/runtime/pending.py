"""Tokens and hidden states of rounds that drafted nothing, kept until the head reads them.

To read one token a round would cost a pass of the head's weights for each. A GPU reads `PENDING` tokens in the time of
one, so that is how many it keeps. A CPU pays by the token whenever it reads them, so it keeps many more: a text may end
before they are needed. On a CPU with a C compiler, to keep a token is one call of `pending.c`.

Letters: B rows, S tokens kept of each, M of them read at once.
"""

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from heads.backends.cpu import pending as cpu
from heads.backends.round_state import RoundState
from heads.base import Observation

PENDING = 64
"""Number of tokens that a head reads at once: a power of two."""
PATIENCE = 16
"""Factor by which more are kept on a CPU."""


def room_of(device: torch.device) -> int:
    """How many tokens of a row are kept there."""
    return PENDING * (PATIENCE if device.type == "cpu" and cpu.load() is not None else 1)


class PendingStates:
    """Pending tokens of every row of a batch."""

    def __init__(self, rounds: RoundState) -> None:
        """`rounds`: the state of the rows; the features' sizes show in the first observation."""
        self.rounds = rounds
        device = rounds.length.device
        self.library, self.room = cpu.load() if device.type == "cpu" else None, room_of(device)  # S
        self.count = torch.zeros_like(rounds.length)  # (B,)
        self.most = 0
        """Upper bound on the tokens of a row, known without asking the device."""
        self.tokens = self.aux_hidden_states = self.hidden = (
            self.count
        )  # (B, S + 1), (B, S, L * D) and (B, S, D), once allocated

    def allocate(self, like: Observation) -> None:
        """Allocate room for features like these."""
        B, S = len(self.count), self.room
        self.tokens = like.tokens.new_zeros(B, S + 1)
        self.aux_hidden_states, self.hidden = (
            fresh.new_zeros(B, S, fresh.shape[2]) for fresh in (like.aux_hidden_states, like.hidden)
        )
        places = (self.tokens, self.count, self.aux_hidden_states, self.hidden)
        sizes = (fresh.shape[2] * fresh.element_size() for fresh in (self.aux_hidden_states, self.hidden))
        self.struct = cpu.PendingStruct(*(place.data_ptr() for place in places), B, S, *sizes)
        self.reference = ctypes.byref(self.struct)

    def forget(self, rows: Tensor) -> None:
        """Drop the pending tokens of some rows (B,) bool."""
        self.count.masked_fill_(rows, 0)

    def keep(self, observation: Observation) -> None:
        """Add a round that drafted nothing: one token of each row."""
        if self.tokens is self.count:
            self.allocate(observation)
        fresh = observation.tokens, observation.aux_hidden_states, observation.hidden, observation.count
        if self.library is not None:
            held = [tensor.contiguous() for tensor in fresh]
            self.library.keep(self.reference, *(tensor.data_ptr() for tensor in held))
            return
        tokens, aux_hidden_states, hidden, count = fresh
        # A row that is done gets padding in a place that is not counted, or in its last: it is reset before it is read.
        at = self.count.clamp_max(self.room - 1)[:, None]
        self.tokens.scatter_(1, torch.cat([at, at + 1], dim=1), tokens)
        self.aux_hidden_states.scatter_(1, at[..., None].expand_as(aux_hidden_states), aux_hidden_states)
        self.hidden.scatter_(1, at[..., None].expand_as(hidden), hidden)
        self.count.add_(count)

    def has_room(self, rounds: int) -> bool:
        """Whether every row has room for so many more; then they are counted as kept."""
        if self.most + rounds > self.room and self.library is not None:
            self.most = int(self.live().max())  # rows come and go; a CPU may be asked
        if self.most + rounds > self.room:
            return False
        self.most += rounds
        return True

    def live(self) -> Tensor:
        """Return (B,) int64, the number of pending tokens of the rows that go on."""
        return torch.where(self.rounds.done, 0, self.count)

    def drain(self) -> Iterator[Observation]:
        """Yield all pending tokens, the oldest first, `PENDING` tokens a row at once, and clear them."""
        if self.most == 0:
            return
        count = self.live()
        start = self.rounds.length - count
        most = self.most if self.library is None else int(count.max())
        for first in range(0, most, PENDING):
            M = min(1 << (most - first - 1).bit_length(), PENDING)  # few shapes
            yield Observation(
                tokens=self.tokens[:, first : first + M + 1],
                aux_hidden_states=self.aux_hidden_states[:, first : first + M],
                hidden=self.hidden[:, first : first + M],
                start=start + first,
                count=(count - first).clamp(0, M),
                nodes=None,
                missed=True,
            )
        self.count.zero_()
        self.most = 0
