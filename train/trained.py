"""The module that the loop trains: a draft head. `train.adapter.Joint` is a head together with the target's adapter."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from heads.base import Batch, DraftHead, HeadLoss


@dataclass(frozen=True)
class Part:
    """A module whose parameters share their settings in the optimizer."""

    module: nn.Module
    by_muon: bool = True
    """False: AdamW updates them, whatever the recipe's optimizer."""
    rates: dict[str, float] = field(default_factory=dict)
    """Entries of their parameter groups with which `train.optim.set_lr` changes the learning rate."""


class Trained(nn.Module):
    """A module whose forward pass returns the head's loss. DDP, DeepSpeed and FSDP wrap this module."""

    write_adapter: Callable[[Path], dict[str, Any]] | None = None
    """Writes the target's adapter and returns its entry in the head's record. None if no adapter is trained."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @property
    def drafts(self) -> DraftHead:
        """The head, typed as a DraftHead."""
        return cast(DraftHead, self.head)

    @property
    def stored(self) -> nn.Module:
        """The module whose weights a checkpoint holds."""
        return self.head

    @property
    def depth_weights(self) -> tuple[float, ...]:
        """The weight of each entry of the loss."""
        return self.drafts.depth_weights

    def parts(self) -> list[Part]:
        """Return the groups of all parameters."""
        return [Part(self.head)]

    def begin_step(self, number: int) -> None:
        """Prepare for step `number`, from 0."""

    def original_target(self) -> AbstractContextManager[None]:
        """Return a context in which the target is as it was before training."""
        return nullcontext()

    def counts(self, loss_mask: Tensor, documents: Tensor) -> Tensor:
        """Return (K,) the number of supervised rows of each entry of the loss."""
        return self.drafts.counts(loss_mask, documents)

    def loss_scale(self, counts: Tensor) -> Tensor:
        """Return (K,) the factor of each entry's sum, from the counts (K,) of the whole step."""
        return self.drafts.loss_scale(counts)

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        """Return the loss on features of the original target."""
        return self.drafts.loss(batch, scale)

    def forward(
        self, batch: Batch, scale: Tensor, touch_all: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor | None]:
        """Return (scaled loss, (K,) sums, metric sums, the weight of `HeadLoss`). `touch_all`: give every parameter a
        gradient."""
        result = self.loss(batch, scale)
        loss = result.loss
        if touch_all or not loss.requires_grad:  # otherwise DDP would wait for gradients that never arrive
            loss = loss + sum(parameter.sum() * 0 for parameter in self.parameters() if parameter.requires_grad)
        return loss, result.sums, result.metrics, result.weight
