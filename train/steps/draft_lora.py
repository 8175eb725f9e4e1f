"""LoRA adapters (Hu et al., arXiv 2106.09685) of a draft model, with peft.

If the recipe has `head.lora`, a draft model is trained through adapters. Merged as W + alpha / rank * B A, its weights
have the same names and shapes as without adapters, so the code that measures and saves need not know of them.
"""

from typing import Any, cast

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from heads.core.contract import DraftHead
from heads.core.errors import UserError


def add_adapters(head: DraftHead) -> None:
    """Add adapters, which change nothing yet, to a head with `lora` settings. Freeze its other parameters. UserError
    for a name in `head.lora.modules` that fits no linear layer."""
    model = head.language_model
    if model is None or (settings := head.config.lora) is None:
        return
    from peft import LoraConfig, inject_adapter_in_model

    output = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not output
    ]
    names = linear
    if settings.modules is not None:
        chosen = {name for wanted in settings.modules for name in linear if _fits(name, wanted)}
        names = [name for name in linear if name in chosen]
    for wanted in settings.modules or ():
        if not any(_fits(name, wanted) for name in names):
            known = ", ".join(sorted({name.split(".")[-1] for name in linear}))
            raise UserError(
                f"head.lora.modules: {wanted!r} fits no linear layer of the draft but its output head, which stays as "
                f"it is; it has {known or 'none'}"
            )
    fused = any(isinstance(model.get_submodule(name), Conv1D) for name in names)
    cast(nn.Module, head).requires_grad_(False)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=names, fan_in_fan_out=fused)
    inject_adapter_in_model(config, model)


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
