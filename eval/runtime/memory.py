"""Whether there is memory for what is asked, before any of it is taken.

Letters: B rows, S slots a row, N nodes of a round.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heads.backends.base import Backend
from heads.backends.slot_mapping import round_up
from heads.backends.torch.attention import GroupedAttention
from heads.backends.triton.attention import SPLIT
from heads.errors import UserError
from heads.target.frozen import FrozenTarget

RESERVE = 0.05
"""Of what is free: kept for the allocator and the library's own."""
LOGITS = 4
"""Copies of a round's logits that are alive at once, at most, in float32."""


@dataclass(frozen=True)
class Need:
    """What a batch takes, in bytes."""

    batch_size: int
    capacity: int
    nodes: int
    per_slot: int
    """Of one slot of one row, in all layers."""
    per_node: int
    """Of one node of one row: its logits, and its streams."""
    per_look: int = 0
    """Of one node and one slot that it looks at, in the widest layer."""
    per_row: int = 0
    """Of one row, however long it is."""

    @property
    def bytes(self) -> int:
        slots = round_up(self.capacity)
        of_a_node = self.per_node + slots * self.per_look
        return self.batch_size * (slots * self.per_slot + self.nodes * of_a_node + self.per_row)


def need_of(
    target: FrozenTarget,
    backend: Backend,
    *,
    batch_size: int,
    capacity: int,
    nodes: int,
    drafts: bool,
    pending: int = 0,
    num_aux_layers: int = 0,
) -> Need:
    """The caches and the widest tensors of a round; a draft's cache is taken for two layers of the target's. `pending`:
    tokens of a row of which a head that rests is not told yet, with their features and `num_aux_layers` auxiliary
    hidden states."""
    config: Any = target.config
    size = target.dtype.itemsize
    layers = target.num_layers
    look = size + 1  # a mask, as truth values and as numbers
    native = backend.native(target)
    if native is not None:
        attention = native.layers[0].attention
        width = attention.slot_width
        if not backend.on_host:  # each split's sums, in float32
            value_width = attention.d if isinstance(attention, GroupedAttention) else attention.C
            look = 4 * attention.num_heads * value_width // SPLIT
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    per_node = 4 * LOGITS * target.vocab_size + size * 8 * config.hidden_size
    per_row = pending * (num_aux_layers + 1) * config.hidden_size * size
    return Need(batch_size, capacity, nodes, (layers + 2 * drafts) * width * size, per_node, look, per_row)


def check_memory(need: Need, device: torch.device, name: str) -> None:
    """UserError where the need is more than is free, saying what would fit."""
    free = free_bytes(device)
    if free is None:
        return
    room = int(free * (1 - RESERVE))
    if need.bytes <= room:
        return
    fits = [
        f"{what} {most}"
        for what, field in (("a batch of", "batch_size"), ("sequences of", "capacity"), ("trees of", "nodes"))
        if (most := largest(need, field, room))
    ]
    advice = f"with the rest as it is, {' or '.join(fits)} would fit" if fits else "no one of them can be cut enough"
    raise UserError(
        f"{name}: {need.batch_size} sequences of {need.capacity} slots, {need.nodes} nodes a round, need "
        f"{gib(need.bytes)} beside the weights; {gib(room)} are free on {device}; {advice}"
    )


def largest(need: Need, field: str, room: int) -> int:
    """The largest value of one field that fits; 0 if none does."""
    low, high = 0, getattr(need, field)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if replace(need, **{field: middle}).bytes <= room else (low, middle - 1)
    return int(low)


def free_bytes(device: torch.device) -> int | None:
    """What the device can still give; None where it does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    info = Path("/proc/meminfo")
    if device.type != "cpu" or not info.is_file():
        return None
    lines = dict(line.split(":", 1) for line in info.read_text(encoding="ascii").splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that there is no memory, or came of one that did: what fails for want of memory while a
    graph is captured ends in the capture's own complaint. A CPU's allocator says so in its text alone."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def gib(count: int) -> str:
    """Bytes in GiB."""
    return f"{count / 2**30:.1f} GiB"
