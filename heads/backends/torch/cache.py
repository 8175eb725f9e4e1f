"""The static cache of a native decoder: one tensor for all layers, a row of it a slot.

What a slot holds is the attention's affair: keys and values of all heads side by side, or one latent. Rows of the batch
stand at different lengths; a step says which slots its tokens go to, and masks say what a query may see.

Letters: L layers, B rows, N tokens of a step, S slots a row, E slots shown to attention, W width of a slot.
"""

import torch
from torch import Tensor


class KVCache:
    """Every layer's past of a whole batch."""

    def __init__(
        self, *, num_layers: int, batch_size: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.batch_size, self.capacity = batch_size, capacity
        self.store = torch.zeros(num_layers, batch_size * capacity, width, dtype=dtype, device=device)
        self.flat = list(self.store)  # per layer (B * S, W)
        self.row_starts = torch.arange(batch_size, device=device)[:, None] * capacity  # (B, 1)
        self.slots = self.row_starts  # (B' * N,) once aimed: where the next step's tokens go, in flat storage
        self.shown: list[Tensor] = []  # per layer (B', E, W)
        self.rows, self.extent = slice(0, 0), 0
        self.aim(self.row_starts, extent=capacity)

    def aim(self, slots: Tensor, *, extent: int, row: int | None = None) -> None:
        """Send the next step's tokens to `slots` (B, N) of every row, or (1, N) of one row; show the first `extent`
        slots."""
        rows = slice(0, self.batch_size) if row is None else slice(row, row + 1)
        alone = self.batch_size == 1
        self.slots = slots[0] if alone else (slots + self.row_starts[rows]).flatten()
        if (rows, extent) != (self.rows, self.extent):
            self.rows, self.extent = rows, extent
            L, _, W = self.store.shape
            self.shown = list(self.store.view(L, self.batch_size, self.capacity, W)[:, rows, :extent])

    def write(self, layer: int, states: Tensor) -> Tensor:
        """Put the step's states (B' * N, W) into the slots aimed at; -> all that is shown, (B', E, W)."""
        self.flat[layer].index_copy_(0, self.slots, states)
        return self.shown[layer]

    def compact(self, slots_from: Tensor, slots_to: Tensor) -> None:
        """Move, in every layer, what row b holds in slots_from[b] to slots_to[b]; (B, P) each. All is read before any
        is written."""
        sources, goals = (slots_from + self.row_starts).flatten(), (slots_to + self.row_starts).flatten()
        self.store.index_copy_(1, goals, self.store.index_select(1, sources))
