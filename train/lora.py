"""LoRA (Hu et al., arXiv 2106.09685) in a head's model, through peft: what is trained in place of whole matrices.

Merged, W + alpha / rank * B A, the weights have the names and shapes that they have without adapters, so what is
measured and saved knows nothing of them.
"""

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from heads.draft import Draft
from heads.draft_config import LoraSettings
from heads.errors import UserError


def add_adapters(head: nn.Module) -> None:
    """Put adapters, which change nothing yet, into a head that asks for them; all else is frozen."""
    if not isinstance(head, Draft) or head.config.lora is None:
        return
    from peft import LoraConfig, inject_adapter_in_model

    settings = head.config.lora
    names = adapted_layers(head, settings)
    untyped: Any = head.model
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=names,
        fan_in_fan_out=any(isinstance(untyped.get_submodule(name), Conv1D) for name in names),
    )
    head.requires_grad_(False)
    inject_adapter_in_model(config, untyped)


def adapted_layers(head: Draft, settings: LoraSettings) -> list[str]:
    """The full names of the layers that get an adapter. UserError for a name that fits none."""
    untyped: Any = head.model
    output = untyped.get_output_embeddings()
    linear = [
        name
        for name, module in head.model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not output
    ]
    if settings.modules is None:
        return linear
    for wanted in settings.modules:
        if not any(_fits(name, wanted) for name in linear):
            known = sorted({name.split(".")[-1] for name in linear})
            raise UserError(
                f"head.lora.modules: {wanted!r} fits no linear layer of the draft but its output head, which stays as "
                f"it is; it has {', '.join(known)}"
            )
    return [name for name in linear if any(_fits(name, wanted) for wanted in settings.modules)]


def _fits(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def merged_weights(head: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a head with adapters as that of the same head without."""
    if not isinstance(head, Draft) or head.config.lora is None:
        return weights
    scale = head.config.lora.alpha / head.config.lora.rank
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
