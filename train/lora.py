"""LoRA (Hu et al., arXiv 2106.09685) in a head's model, through peft: what is trained in place of whole matrices.

Merged, W + alpha / rank * B A, the weights have the names and shapes that they have without adapters, so what is
measured and saved knows nothing of them.
"""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from heads.base import DraftHead
from heads.errors import UserError


def add_adapters(head: nn.Module) -> None:
    """Put adapters, which change nothing yet, into a head that asks for them; all else is frozen."""
    model: Any = cast(DraftHead, head).language_model
    if model is None or (settings := cast(DraftHead, head).config.lora) is None:
        return
    from peft import LoraConfig, inject_adapter_in_model

    names = linear_layers(model, model.get_output_embeddings(), settings.modules, "head.lora.modules", "the draft")
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=names,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in names),
    )
    head.requires_grad_(False)
    inject_adapter_in_model(config, model)


def linear_layers(
    model: nn.Module, output: nn.Module, wanted: Sequence[str] | None, setting: str, whose: str
) -> list[str]:
    """The full names of the linear layers whose names end in one of `wanted`, all of them if None; never the output
    head. UserError, in the name of the setting and of whose layers they are, where one fits none."""
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
    """The state dict of a head with adapters as that of the same head without."""
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
