"""Medusa-2 (Cai et al., arXiv 2401.10774, sections 2.2.2 and 2.3.2): a LoRA adapter of the target, trained with a head.

    loss = heads_weight * loss of the head on the adapted target's states + KL(p_0 || p) on every label

p is the adapted target's distribution and p_0 the target's own, with the adapter off: the text may become easier to
foresee but must stay the target's. First the head is trained alone, then both, the head at a multiple of the adapter's
rate.

Letters: B batch, T tokens, D hidden, V vocabulary, K depth, R labels.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from heads.base import Batch, DraftHead, HeadLoss
from heads.checkpoint import file_hash
from heads.errors import UserError
from heads.labels import supervised
from heads.losses import draft_loss
from heads.target.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from heads.target.families import OutputHead
from heads.target.frozen import FrozenTarget, decode, packed_visible
from train.lora import linear_layers
from train.recipe import Adapter


class TargetAdapter(nn.Module):
    """The trainable matrices that peft puts into a target's linear layers; on, unless said otherwise."""

    def __init__(self, target: FrozenTarget, settings: Adapter) -> None:
        super().__init__()
        self.target, self.settings = target, settings
        self.model = [_with_lora(target, settings)]  # in a list: the target is no part of this module's state
        named = [(name, p) for name, p in target.model.named_parameters() if p.requires_grad]
        self.matrices = nn.ParameterDict({name.replace(".", "/"): parameter for name, parameter in named})
        self.dropouts = [m for m in target.model.modules() if isinstance(m, nn.Dropout) and m.training]
        target.model.eval()

    @contextmanager
    def off(self) -> Iterator[None]:
        """The target as it was."""
        with self.model[0].disable_adapter():
            yield

    def hidden(self, batch: Batch) -> Tensor:
        """(B, T, D) the adapted target's last hidden state after its final norm, with gradient, dropout at work."""
        target = self.target
        for dropout in self.dropouts:
            dropout.train()
        try:
            return decode(
                target.base,
                target.config,
                target.dtype,
                batch.tokens,
                positions=batch.positions,
                visible=packed_visible(batch.documents),
                key_positions=batch.positions,
            )
        finally:
            for dropout in self.dropouts:
                dropout.eval()

    def save(self, folder: Path) -> dict[str, Any]:
        """Write peft's folder, and return what a head's record says of the adapter."""
        self.model[0].save_pretrained(str(folder), save_embedding_layers=False)
        for extra in folder.iterdir():
            if extra.name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                extra.unlink()  # a model card of empty headings
        return {
            "rank": self.settings.rank,
            "alpha": self.settings.alpha,
            "parameters": sum(parameter.numel() for parameter in self.matrices.values()),
            "sha256": file_hash(folder / ADAPTER_WEIGHTS),
        }


class Joint(nn.Module):
    """A head and its target's adapter as what the loop trains.

    Its last depth is no depth: there the loss is the adapted target's divergence from the target as it was, and its
    metrics say how far the two agree.
    """

    def __init__(self, head: nn.Module, adapter: TargetAdapter) -> None:
        super().__init__()
        self.head, self.adapter = head, adapter
        self.begun = False

    @property
    def drafts(self) -> DraftHead:
        return cast(DraftHead, self.head)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        return self.drafts.aux_layer_ids

    @property
    def depth_weights(self) -> tuple[float, ...]:
        share = self.adapter.settings.heads_weight
        return (*(share * weight for weight in self.drafts.depth_weights), 1.0)

    def begin_step(self, number: int) -> None:
        """Which stage step `number`, from 0, is in."""
        self.begun = number >= self.adapter.settings.first_step

    def counts(self, loss_mask: Tensor, documents: Tensor) -> Tensor:
        labels = supervised(loss_mask, documents, 1).sum() * self.begun
        return torch.cat([self.drafts.counts(loss_mask, documents), labels.float()[None]])

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        """`batch` holds the features of the target as it was."""
        if not self.begun:
            return _with_last(self.drafts.loss(batch, scale[:-1]), None)
        adapted = self.adapter.hidden(batch).to(batch.hidden.dtype)
        own = self.drafts.loss(replace(batch, hidden=adapted), scale[:-1])
        return _with_last(own, self.drift(batch, adapted, scale[-1:]))

    def drift(self, batch: Batch, adapted: Tensor, scale: Tensor) -> HeadLoss:
        """KL(p_0 || p) over all labels; adapted (B, T, D) with gradient."""
        row, label = supervised(batch.loss_mask, batch.documents, 1, pad=True).nonzero(as_tuple=True)
        target = self.adapter.target
        distribution = target.shared.lm_head
        assert isinstance(distribution, OutputHead)
        loss, sums, correct, overlap = draft_loss(
            distribution.scale * adapted[row, label - 1][None],
            target.lm_head_weight.to(adapted.dtype),
            torch.ones(1, len(row), dtype=torch.bool, device=row.device),
            batch.hidden[row, label - 1],
            batch.shared.lm_head,
            torch.arange(target.vocab_size, device=row.device),
            scale,
            soft_cap=distribution.soft_cap,
        )
        agreed = correct.sum(1).float()
        names = {"correct": agreed, "accepted": agreed, "overlap": overlap.float()}
        return HeadLoss(loss, sums, names)


def _with_last(own: HeadLoss, last: HeadLoss | None) -> HeadLoss:
    """The head's loss with one entry more for the adapter's; metrics that it has not are 0."""
    nothing = own.sums.new_zeros(1)
    metrics = {
        name: torch.cat([value, nothing.to(value.dtype) if last is None else last.metrics.get(name, nothing)])
        for name, value in own.metrics.items()
    }
    if last is None:
        return HeadLoss(own.loss, torch.cat([own.sums, nothing]), metrics)
    return HeadLoss(own.loss + last.loss, torch.cat([own.sums, last.sums]), metrics)


def check_adapter(target: FrozenTarget, settings: Adapter, head: DraftHead) -> None:
    """Refuse an adapter that the target or the head cannot bear, before time is spent on data."""
    if head.aux_layer_ids:
        raise UserError(
            "target.adapter: the head reads auxiliary hidden states of the target, only heads on its last hidden "
            "state are trained with "
            "an adapter; use head.kind medusa"
        )
    if target.quantize:
        raise UserError(f"target.adapter: needs whole weights; leave target.quantize={target.quantize} out")
    if not linear_layers(target.model, target.head, settings.modules, "target.adapter.modules", target.name):
        raise UserError(f"target.adapter: {target.name} has no linear layer to adapt; leave it out")


def make_adapter(target: FrozenTarget, settings: Adapter, seed: int) -> TargetAdapter:
    """Put an adapter into the target, which changes nothing until it is trained."""
    torch.manual_seed(seed)
    return TargetAdapter(target, settings)


def _with_lora(target: FrozenTarget, settings: Adapter) -> Any:
    """The model as peft wraps it; its layers are changed in place."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=settings.modules or "all-linear",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft's, not the user's
        return get_peft_model(target.model, config)
