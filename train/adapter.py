"""LoRA adapters (Hu et al., arXiv 2106.09685) of a target and of a draft model, with peft.

If the recipe has `head.lora`, a draft model is trained through adapters. Merged as W + alpha / rank * B A, its weights
have the same names and shapes as without adapters, so the code that measures and saves need not know of them.

A target's adapter is Medusa-2 (Cai et al., arXiv 2401.10774, sections 2.2.2 and 2.3.2). It is trained with a head:

    loss = heads_weight * loss of the head on the adapted target's hidden states + KL(p_0 || p) on every label

p is the adapted target's distribution, and p_0 is the original target's, with the adapter off. The text may become
easier to predict, but must stay close to the target's. First the head is trained alone, then both, the head at a
multiple of the adapter's learning rate.

Letters: B batch, T tokens, D hidden, V vocabulary, K depth, R labels.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from heads.base import Batch, DraftHead, HeadLoss
from heads.checkpoint import file_hash
from heads.errors import UserError
from heads.labels import supervised
from heads.losses import draft_loss
from heads.target.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from heads.target.families import OutputHead
from heads.target.forward import decode_packed
from heads.target.model import FrozenTarget
from train.launch import wanted_mode
from train.recipe import Adapter
from train.trained import Part, Trained


class TargetAdapter(nn.Module):
    """The trainable matrices that peft adds to a target's linear layers. They are active except inside `off()`."""

    def __init__(self, target: FrozenTarget, settings: Adapter) -> None:
        from peft import get_peft_model

        super().__init__()
        self.target, self.settings = target, settings
        more = {"lora_dropout": settings.dropout, "task_type": "CAUSAL_LM"}
        config = _lora_config(settings, settings.modules or "all-linear", **more)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # caused by peft
            # A list keeps the target out of this module's state. peft changes its layers in place.
            self.model: list[Any] = [get_peft_model(target.model, config)]
        named = [(name, p) for name, p in target.model.named_parameters() if p.requires_grad]
        self.matrices = nn.ParameterDict({name.replace(".", "/"): parameter for name, parameter in named})
        self.dropouts = [
            module for module in target.model.modules() if isinstance(module, nn.Dropout) and module.training
        ]
        target.model.eval()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapter off: inside, the target is the original one."""
        with self.model[0].disable_adapter():
            yield

    def hidden(self, batch: Batch) -> Tensor:
        """Return (B, T, D) the adapted target's last hidden state after its final norm, with gradient and dropout."""
        target = self.target
        for dropout in self.dropouts:
            dropout.train()
        try:
            given = (target.base, target.config, target.dtype, batch.tokens)
            return decode_packed(*given, positions=batch.positions, documents=batch.documents)
        finally:
            for dropout in self.dropouts:
                dropout.eval()

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the adapter in peft's format, and return its entry in a head's record."""
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


class Joint(Trained):
    """A head together with its target's adapter, as the module that the loop trains.

    The last entry of the loss is not a depth of the head. It is the divergence of the adapted target from the original
    target, and its metrics are their agreement.
    """

    def __init__(self, head: nn.Module, target: FrozenTarget, settings: Adapter, seed: int) -> None:
        """Add an adapter to the target. It changes nothing until it is trained."""
        super().__init__(head)
        torch.manual_seed(seed)
        self.adapter = TargetAdapter(target, settings)
        self.write_adapter = self.adapter.save
        self.begun = False

    @property
    def stored(self) -> nn.Module:
        return self

    def parts(self) -> list[Part]:
        settings = self.adapter.settings
        return [
            Part(self.head, rates={"lr_multiple": settings.head_lr_multiple}),
            Part(self.adapter, rates={"lr_from": settings.first_step}, by_muon=False),
        ]

    def original_target(self) -> AbstractContextManager[None]:
        return self.adapter.off()

    @property
    def depth_weights(self) -> tuple[float, ...]:
        share = self.adapter.settings.heads_weight
        return (*(share * weight for weight in self.drafts.depth_weights), 1.0)

    def loss_scale(self, counts: Tensor) -> Tensor:
        return DraftHead.loss_scale(cast(DraftHead, self), counts)

    def begin_step(self, number: int) -> None:
        """Train the adapter too from its first step on. `number` counts from 0."""
        self.begun = number >= self.adapter.settings.first_step

    def counts(self, loss_mask: Tensor, documents: Tensor) -> Tensor:
        labels = supervised(loss_mask, documents, 1).sum() * self.begun
        return torch.cat([self.drafts.counts(loss_mask, documents), labels.float()[None]])

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        """Return the loss. `batch` holds the features of the original target."""
        if not self.begun:
            return _with_last(self.drafts.loss(batch, scale[:-1]), None)
        adapted = self.adapter.hidden(batch).to(batch.hidden.dtype)
        own = self.drafts.loss(replace(batch, hidden=adapted), scale[:-1])
        return _with_last(own, self.drift(batch, adapted, scale[-1:]))

    def drift(self, batch: Batch, adapted: Tensor, scale: Tensor) -> HeadLoss:
        """Return KL(p_0 || p) over all labels. `adapted`: (B, T, D) with gradient."""
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
    """Return the head's loss with one more entry for the adapter. Metrics that the adapter lacks are 0 there."""
    nothing = own.sums.new_zeros(1)
    metrics = {
        name: torch.cat([value, nothing.to(value.dtype) if last is None else last.metrics.get(name, nothing)])
        for name, value in own.metrics.items()
    }
    if last is None:
        return HeadLoss(own.loss, torch.cat([own.sums, nothing]), metrics)
    return HeadLoss(own.loss + last.loss, torch.cat([own.sums, last.sums]), metrics)


def check_adapter(settings: Adapter, target: FrozenTarget, head: DraftHead) -> None:
    """Raise UserError for an adapter that does not work with the launch, the target or the head."""
    if wanted_mode() != "ddp":
        raise UserError("target.adapter: is not cut up by DeepSpeed or FSDP; launch without them")
    if head.aux_layer_ids:
        raise UserError(
            "target.adapter: the head reads auxiliary hidden states of the target, only heads on its last hidden "
            "state are trained with an adapter; use head.kind medusa"
        )
    if target.quantize:
        raise UserError(f"target.adapter: needs whole weights; leave target.quantize={target.quantize} out")
    if not linear_layers(target.model, target.head, settings.modules, "target.adapter.modules", target.name):
        raise UserError(f"target.adapter: {target.name} has no linear layer to adapt; leave it out")


def _lora_config(settings: Any, modules: str | list[str], **more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=modules, **more)


def add_adapters(head: DraftHead) -> None:
    """Add adapters, which change nothing yet, to a head with `lora` settings. Freeze its other parameters."""
    model: Any = head.language_model
    if model is None or (settings := head.config.lora) is None:
        return
    from peft import inject_adapter_in_model

    names = linear_layers(model, model.get_output_embeddings(), settings.modules, "head.lora.modules", "the draft")
    fused = any(isinstance(model.get_submodule(name), Conv1D) for name in names)
    cast(nn.Module, head).requires_grad_(False)
    inject_adapter_in_model(_lora_config(settings, names, fan_in_fan_out=fused), model)


def linear_layers(
    model: nn.Module, output: nn.Module, wanted: Sequence[str] | None, setting: str, whose: str
) -> list[str]:
    """Return the full names of the linear layers whose names end in one of `wanted`, or of all if it is None, without
    the output head. UserError if a wanted name fits none; `setting` and `whose` are for its text."""
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not output
    ]
    if wanted is None:
        return linear
    for name in wanted:
        if not any(_fits(layer, name) for layer in linear):
            known = ", ".join(sorted({layer.split(".")[-1] for layer in linear}))
            raise UserError(
                f"{setting}: {name!r} fits no linear layer of {whose} but its output head, which stays as it is; "
                f"it has {known or 'none'}"
            )
    return [layer for layer in linear if any(_fits(layer, name) for name in wanted)]


def _fits(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")


def merged_weights(head: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a head with its adapters merged, with the names of a head without adapters."""
    drafts = cast(DraftHead, head)
    if drafts.language_model is None or (settings := drafts.config.lora) is None:
        return weights
    scale = settings.alpha / settings.rank
    merged = {}
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        layer = name.removesuffix(".base_layer.weight")
        if layer != name:
            change = scale * weights[f"{layer}.lora_B.default.weight"] @ weights[f"{layer}.lora_A.default.weight"]
            fused: Any = head.get_submodule(layer)
            weight = weight + (change.T if fused.fan_in_fan_out else change).to(weight.dtype)
        merged[name.replace(".base_layer.", ".")] = weight
    return merged
