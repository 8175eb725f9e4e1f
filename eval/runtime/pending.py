"""Tokens and hidden states of rounds that drafted nothing, kept until the head reads them.

To read one token a round would cost a pass of the head's weights for each. A GPU reads `PENDING` tokens in the time of
one, so that is how many it keeps. A CPU pays by the token whenever it reads them, so it keeps many more: a text may end
before they are needed.

Letters: B rows, S tokens kept of each, M of them read at once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from heads.backends.round_state import RoundState
from heads.base import Observation

PENDING = 64
"""Number of tokens that a head reads at once: a power of two."""
PATIENCE = 16
"""Factor by which more are kept on a CPU."""


def room_of(device: torch.device) -> int:
    """Return the number of tokens kept for a row on a device."""
    return PENDING * (PATIENCE if device.type == "cpu" else 1)


class PendingStates:
    """Pending tokens of every row of a batch."""

    def __init__(self, rounds: RoundState) -> None:
        """`rounds`: the state of the rows; the features' sizes show in the first observation."""
        self.rounds = rounds
        device = rounds.length.device
        self.room = room_of(device)  # S
        self.may_ask = device.type == "cpu"
        """True where asking the device does not wait for it."""
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

    def forget(self, rows: Tensor) -> None:
        """Drop the pending tokens of some rows (B,) bool."""
        self.count.masked_fill_(rows, 0)

    def keep(self, observation: Observation) -> None:
        """Add a round that drafted nothing: one token of each row."""
        if self.tokens is self.count:
            self.allocate(observation)
        aux_hidden_states, hidden = observation.aux_hidden_states, observation.hidden
        # A row that is done gets padding in a place that is not counted, or in its last: it is reset before it is read.
        at = self.count.clamp_max(self.room - 1)[:, None]
        self.tokens.scatter_(1, torch.cat([at, at + 1], dim=1), observation.tokens)
        self.aux_hidden_states.scatter_(1, at[..., None].expand_as(aux_hidden_states), aux_hidden_states)
        self.hidden.scatter_(1, at[..., None].expand_as(hidden), hidden)
        self.count.add_(observation.count)

    def has_room(self, rounds: int) -> bool:
        """Return True if every row has room for so many more, and count them as kept."""
        if self.most + rounds > self.room and self.may_ask:
            self.most = int(self.live().max())  # rows come and go
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
        most = int(count.max()) if self.may_ask else self.most
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
