"""Features of packed rows: the interface of their sources."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from eval.runtime.memory import free_bytes
from heads.target.frozen import FrozenTarget
from train.data.packing import Mixture, Rows

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
    on_gpu = target.device.type == "cuda"
    free = torch.cuda.mem_get_info(target.device)[0] if on_gpu else free_bytes() or 0
    return ROOM * size <= free
