"""Features, which are hidden states of the target for packed rows, and the batch of them that a head's loss reads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from heads.core.contract import Batch, Rows, SharedLayers
from heads.core.host_memory import free_memory
from heads.targets.families import OutputHead
from heads.targets.frozen_target import FrozenTarget
from train.data.packing import Mixture

ROOM = 1.2
"""Memory that a whole target needs to decode, as a multiple of the size of its weights."""


class FeatureSource:
    """A source of features for packed rows, which `target.packed_features` returns. This class serves a target whose
    layers are in the processes of the launch. Other sources derive from it."""

    steps_ahead = 0
    """Number of steps whose rows are passed to `expect` ahead of training."""

    def __init__(self, target: FrozenTarget, load_whole: Callable[[], FrozenTarget] | None = None) -> None:
        """`load_whole`: loads a copy that can decode, if `target` is not whole; None if there is no room for one."""
        self.target = target
        self._load_whole = load_whole
        self._kept: FrozenTarget | None = None
        """A copy of an earlier measurement, where the memory of the machine has room for it during training, too."""

    @property
    def measures(self) -> bool:
        """True if the runtime can measure heads on the main process."""
        return self.target.placement == "whole" or self._load_whole is not None

    @contextmanager
    def whole(self) -> Iterator[FrozenTarget]:
        """Provide a target that can decode, for a `with` block. A copy is released at its end on a GPU, whose memory
        the training needs. On a CPU with room for one more, it is kept for the next block."""
        if self.target.placement == "whole":
            yield self.target
            return
        assert self._load_whole is not None
        copy = self._kept or self._load_whole()
        if copy.device.type == "cpu" and (self._kept is not None or has_room(copy)):
            self._kept = copy
        yield copy

    def check(self, mixture: Mixture, aux_layer_ids: tuple[int, ...]) -> None:
        """Raise UserError if features of these rows would be missing or wrong. Called by every process."""

    def expect(self, rows: Rows) -> None:
        """Announce rows whose features will be requested later, in the order of the calls."""

    def close(self) -> None:
        """Stop background work."""


def has_room(target: FrozenTarget) -> bool:
    size = sum(parameter.numel() for parameter in target.model.parameters()) * target.dtype.itemsize
    on_gpu = target.device.type == "cuda"
    free = torch.cuda.mem_get_info(target.device)[0] if on_gpu else free_memory() or 0
    return ROOM * size <= free


def make_batch(target: FrozenTarget, rows: Rows, aux_layer_ids: Sequence[int], dtype: torch.dtype) -> Batch:
    """Return the batch of `rows`, with features in the head's dtype, on the target's device.

    Under autocast, the target's matrix products are in its dtype, like the head's; otherwise in the target's own dtype.
    """
    names = ("tokens", "loss_mask", "positions", "documents")
    inputs = {name: getattr(rows, name).to(target.device, non_blocking=True) for name in names}
    features = target.packed_features(inputs["tokens"], inputs["positions"], inputs["documents"], aux_layer_ids)
    with torch.no_grad():
        embeddings = target.shared.embed_tokens(inputs["tokens"])

    device = target.device.type
    lm_head = target.lm_head
    if torch.is_autocast_enabled(device) and isinstance(lm_head, OutputHead):
        # A copy, since autocast would cast the weights again for every chunk of the loss.
        lm_head = lm_head.in_dtype(torch.get_autocast_dtype(device))

    def logits(hidden: Tensor) -> Tensor:
        with torch.autocast(device, enabled=False):
            return lm_head(hidden)

    return Batch(
        **inputs,
        seed=rows.seed,
        progress=rows.progress,
        embeddings=embeddings.to(dtype),
        aux_hidden_states=features.aux_hidden_states.to(dtype),
        hidden=features.hidden.to(dtype),
        shared=SharedLayers(
            embed_tokens=target.shared.embed_tokens, lm_head=logits, lm_head_weight=target.lm_head_weight
        ),
    )
