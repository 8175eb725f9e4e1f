"""The target's own LoRA adapter (Hu et al., arXiv 2106.09685): W + alpha / rank * B A replaces W.

Medusa-2 (arXiv 2401.10774, section 2.2.2) trains one together with its heads. The adapter is in the head's folder, in
peft's format. It is merged into the target's weights before any measurement: the head's target is the adapted one.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from heads.errors import UserError, first_line
from heads.target.model import FrozenTarget

ADAPTER = "adapter"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, PARTS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
BEYOND = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication")
"""peft settings that make an adapter something other than W + alpha / rank * B A."""


@torch.no_grad()
def merge_adapter(target: FrozenTarget, folder: Path, facts: dict[str, Any]) -> None:
    """Merge the adapter in `folder` into the target's weights. `facts` is its entry in the head's record.

    Raises UserError if the adapter is missing or damaged, cannot be merged, or belongs to another architecture.
    """
    if target.quantize:
        raise UserError(
            f"{folder}: an adapter is taken into whole weights, not {target.quantize}; load the target whole"
        )
    config, weights = _read(folder, facts)
    if config.get("peft_type") != "LORA" or any(config.get(name) for name in BEYOND) or config.get("bias") != "none":
        raise UserError(f"{folder}: not a plain LoRA adapter; only W + alpha / rank * B A can be merged")
    names = sorted({name.removeprefix(PREFIX).removesuffix(part) for name in weights for part in PARTS})
    names = [name for name in names if not name.endswith(PARTS)]
    scale = config["lora_alpha"] / config["r"]
    modules = dict(target.model.named_modules())
    for name in names:
        down, up = (weights.pop(f"{PREFIX}{name}{part}", None) for part in PARTS)
        matrix: Any = getattr(modules.get(name), "weight", None)
        if down is None or up is None or matrix is None:
            raise UserError(
                f"{folder}: {name}: not a layer of {target.name} with both halves of an adapter; name its own target"
            )
        change = scale * (up.float() @ down.float()).to(matrix.device)  # (out, in)
        if not isinstance(modules[name], nn.Linear):  # GPT-2's layers store (in, out)
            change = change.T
        if change.shape != matrix.shape:
            raise UserError(
                f"{folder}: {name}: adapts a matrix of {tuple(change.shape)}, {target.name} has {tuple(matrix.shape)}; "
                "name its own target"
            )
        matrix.copy_((matrix.float() + change).to(matrix.dtype))
    if weights:
        raise UserError(f"{folder}: {min(weights)}: not a tensor of a LoRA adapter; only such are read")
    target.adapter = facts


def _read(folder: Path, facts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for file in (folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS):
        if not file.is_file():
            raise UserError(f"{file}: missing; the head was trained for a target with this adapter, fetch all of it")
    with (folder / ADAPTER_WEIGHTS).open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != facts.get("sha256"):
            raise UserError(f"{folder}: not the adapter that the head was saved with; fetch all of it again")
    try:
        return json.loads((folder / ADAPTER_CONFIG).read_text()), load_file(folder / ADAPTER_WEIGHTS)
    except Exception as error:  # JSON and safetensors raise their own kinds of errors
        raise UserError(f"{folder}: truncated or damaged ({first_line(error)}); fetch or train it again") from error
