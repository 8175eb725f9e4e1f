"""Features of packed rows: the interface of their sources."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from heads.target.frozen import FrozenTarget
from train.data.packing import Mixture, Rows

MEMORY = Path("/proc/meminfo")
ROOM = 1.2
"""Memory for a whole target that decodes, in sizes of its weights."""


class FeatureSource:
    """Features of packed rows, by `target.packed_features`. This class is of a target whose layers are in the processes
    of the launch; others derive from it."""

    steps_ahead = 0
    """Steps whose rows `expect` is to be given before they are trained on."""

    def __init__(self, target: FrozenTarget, load_whole: Callable[[], FrozenTarget] | None = None) -> None:
        """`load_whole`: loads a copy that decodes, where `target` is not whole; None where there is no room for one."""
        self.target, self._load_whole = target, load_whole

    @property
    def measures(self) -> bool:
        """True if heads can be measured by the runtime on the main process."""
        return self.target.placement == "whole" or self._load_whole is not None

    @contextmanager
    def whole(self) -> Iterator[FrozenTarget]:
        """Give a target that decodes. A copy is let go of at the end."""
        if self.target.placement == "whole":
            yield self.target
            return
        assert self._load_whole is not None
        copy = self._load_whole()
        copy.backend = self.target.backend
        yield copy

    def check(self, mixture: Mixture, aux_layer_ids: tuple[int, ...]) -> None:
        """Refuse to train where features of these rows would be missing or wrong. Called by every process."""

    def expect(self, rows: Rows) -> None:
        """Take note of rows whose features will be asked for, in this order."""

    def close(self) -> None:
        """End what runs in the background."""


def has_room(target: FrozenTarget) -> bool:
    """True if the target's device has room for the whole target beside what it holds."""
    size = sum(parameter.numel() for parameter in target.model.parameters()) * target.dtype.itemsize
    return ROOM * size <= free_memory(target.device)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a device that are free; of a CPU's memory none where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = MEMORY.read_text().splitlines() if MEMORY.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
