"""State that drafters with a cache of their own share: slots, roots and lengths of one batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.target.slots import round_up
from heads.tree import TreeShape


@dataclass
class SlotState:
    """Static tensors of one batch of sequences, for a head that drafts with a cache.

    Slot p of the cache holds the key of one token. Draft tokens use the slots after the observed ones; accepted tokens
    overwrite these slots later.
    """

    shape: TreeShape
    slot: Tensor  # (S,) int64, 0 .. S - 1
    root: Tensor  # (B,) int64
    length: Tensor  # (B,) int64, the root's position: slots before it are observed

    def extent(self, tokens: int) -> int:
        """Return the number of slots that attention must read when `tokens` more follow the observed ones: all slots
        on a GPU, where the host would have to wait for the lengths."""
        if self.slot.device.type != "cpu":
            return len(self.slot)
        return min(round_up(int(self.length.max()) + tokens), len(self.slot))


def take_newest(
    tokens: Tensor,
    start: Tensor,
    count: Tensor,
    root: Tensor,
    length: Tensor,
    *,
    previous: Tensor | None = None,
    recycled: Tensor | None = None,
    made: Tensor | None = None,
) -> None:
    """Update root and length (B,) in rows with new tokens; also previous (B,), the token before the root, and recycled
    (B, D), from made (B, M, D), the states of all tokens except the first. tokens (B, M + 1) begin at position start
    (B,); the first count (B,) + 1 of them are valid."""
    live, last = count > 0, (count - 1).clamp_min(0)
    if previous is not None:
        previous.copy_(torch.where(live, tokens.gather(1, last[:, None])[:, 0], previous))
    if recycled is not None and made is not None:
        final = made.gather(1, last[:, None, None].expand(-1, 1, made.shape[2]))[:, 0]
        recycled.copy_(torch.where(live[:, None], final, recycled))
    root.copy_(torch.where(live, tokens.gather(1, count[:, None])[:, 0], root))
    length.copy_(torch.where(live, start + count, length))
