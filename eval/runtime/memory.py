"""Estimate of a batch's memory on a CPU, before anything is allocated.

A GPU refuses an allocation that does not fit. On a CPU the operating system grants it, and kills the process once the
memory is used.
"""

from heads.core.errors import UserError
from heads.core.host_memory import free_memory
from heads.kernels.slots import round_up
from heads.targets.families import layer_setting
from heads.targets.frozen_target import FrozenTarget

RESERVE = 0.05
"""Share of free memory kept for the allocator."""
LOGITS = 4
"""Maximum number of float32 copies of a round's logits alive at once."""


def check_memory(target: FrozenTarget, batch_size: int, capacity: int, *, nodes: int, drafts: bool) -> None:
    """Raise UserError if a batch needs more bytes than are free. The message names a batch that would fit.

    Counted are the caches and the widest tensors of a round. A draft's cache counts as two of the target's layers. A
    recurrent layer keeps a state after each node.
    """
    config = target.config
    size = target.dtype.itemsize
    slots = round_up(capacity)
    queries = layer_setting(config, "num_attention_heads")
    keys = layer_setting(config, "num_key_value_heads") or queries
    width = 2 * keys * (layer_setting(config, "head_dim") or config.hidden_size // queries)
    cache = slots * (target.attention_layers + 2 * drafts) * width * size + (nodes + 1) * target.state_bytes
    node = 4 * LOGITS * target.vocab_size + size * 8 * config.hidden_size
    mask = slots * (size + 1)  # as bool and in the target's dtype
    per_row = int(cache + nodes * (node + mask))
    free = free_memory()
    if free is None or batch_size * per_row <= free * (1 - RESERVE):
        return
    room = int(free * (1 - RESERVE))
    most = room // per_row
    fits = f"a batch of {most} would fit" if most else "shorten the sequences, or make the trees smaller"
    raise UserError(
        f"{target.name}: a batch of {batch_size} needs {batch_size * per_row / 2**30:.1f} GiB in addition to the "
        f"weights, and {room / 2**30:.1f} GiB are free; {fits}"
    )
