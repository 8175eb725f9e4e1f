"""The names of multi-token prediction modules in each family, and the modules that a target brings."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.core.errors import UserError
from heads.parts.family_layers import block_record
from heads.parts.head_shape import block_settings
from heads.targets.frozen_target import FrozenTarget

PARTS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""The target's own embeddings and output head. DeepSeek's modules store copies of them."""


@dataclass(frozen=True)
class Layout:
    """Names of the tensors of a module in one family."""

    prefix: str
    """Prefix of module i; n is the number of the target's decoder layers."""
    parts: tuple[str, str, str, str]
    """Names of PARTS."""
    block: str
    """Text between the prefix and the names of the decoder block."""
    hidden_first: bool
    """True if the first half of the projection reads the hidden state."""
    zero_first: bool = False
    """True if engines read the token at position 0 as zeros: vLLM in both layouts that set it, SGLang only in
    MiMo's."""
    pre_norm: bool = False
    """True if the family's own modules read the target's last hidden state before its final norm."""

    def of_module(self, i: int, layers: int) -> str:
        return self.prefix.format(i=i, n=layers + i)


LAYOUTS = {
    "mimo": Layout("model.mtp_layers.{i}.", PARTS, "", hidden_first=True, zero_first=True, pre_norm=True),
    "deepseek": Layout(
        "model.layers.{n}.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "",
        hidden_first=False,
        zero_first=True,
    ),
    "qwen": Layout(
        "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0.", hidden_first=False
    ),
}


def field_name(own: str, layout: Layout, layers: int) -> str:
    """Return the family's name of `mtp_layers.I.PART.weight` or `mtp_layers.I.block.NAME`."""
    match = re.fullmatch(r"mtp_layers\.(\d+)\.(\w+)\.(.+)", own)
    assert match, own
    prefix = layout.of_module(int(match[1]), layers)
    part = match[2]
    rest = match[3]
    if part == "block":
        return prefix + layout.block + rest.removeprefix("layer.")
    return f"{prefix}{layout.parts[PARTS.index(part)]}.{rest}"


def to_field(own: Mapping[str, Tensor], layout: Layout, layers: int, stored: Collection[str] = ()) -> dict[str, Tensor]:
    """Return views of a head's tensors under the family's names. The head holds a layer's experts as one tensor. They
    are split into one tensor each, unless the checkpoint, whose names are `stored`, has them as one, too."""
    out = {}
    for name, value in own.items():
        name = field_name(name, layout, layers)
        if name in stored:
            out[name] = value
        elif name.endswith(".experts.gate_up_proj"):
            for e, both in enumerate(value):
                for projection, matrix in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    out[name.replace("gate_up_proj", f"{e}.{projection}.weight")] = matrix
        elif name.endswith(".experts.down_proj"):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): matrix for e, matrix in enumerate(value)}
        else:
            out[name] = value
    return out


def count_modules(layout: Layout, names: Iterable[str], layers: int) -> int:
    """Return the number of modules of this layout among the tensors, counted from the first; at most 1 if all share a
    prefix."""
    held = set(names)
    count = 0
    while f"{layout.of_module(count, layers)}{layout.parts[2]}.weight" in held:
        count += 1
        if layout.of_module(count, layers) == layout.of_module(0, layers):
            break
    return count


def find_modules(names: Collection[str], layers: int) -> tuple[str, int]:
    """Return the layout and the number of the modules among a checkpoint's tensors. The number is 0 if there are
    none."""
    counts = {name: count_modules(layout, names, layers) for name, layout in LAYOUTS.items()}
    return max(counts.items(), key=lambda layout_and_count: layout_and_count[1])


def module_names(names: Iterable[str], layout: Layout, count: int, layers: int) -> list[str]:
    prefixes = tuple({layout.of_module(i, layers) for i in range(count)})
    return [name for name in names if name.startswith(prefixes)]


def read_native(
    path: str, names: Collection[str], read: Callable[[list[str]], dict[str, Tensor]], target: FrozenTarget
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the MTP modules in a checkpoint of the target with tensors of these `names`: the settings that they
    determine, for an `MtpConfig` over the target's whole vocabulary, and their tensors under the family's names.

    Copies of the target's embeddings and output head in a module must be equal to them, and are left out. Raises
    UserError if there is no module, if there are fewer than the config says, or if one is quantised.
    """
    config = target.config
    layers: int = config.num_hidden_layers
    layout, count = find_modules(names, layers)
    if count == 0:
        looked = ", ".join(f"{layout.of_module(0, layers)}{layout.parts[2]}" for layout in LAYOUTS.values())
        raise UserError(
            f"{path}: holds no module of multi-token prediction (looked for {looked}); "
            "leave head.native out to train one from scratch"
        )
    counts = (getattr(config, key, None) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if (promised := next(filter(None, counts), count)) > count:
        raise UserError(
            f"{path}: its config.json promises {promised} modules of multi-token prediction, its files hold {count}; "
            "fetch the whole checkpoint"
        )
    weights = read(module_names(names, LAYOUTS[layout], count, layers))
    embed: Any = target.shared.embed_tokens
    for end, ours in zip(SHARED, (embed.weight, target.lm_head_weight), strict=True):
        for key in [key for key in weights if key.endswith(end)]:
            value = weights.pop(key)
            if value.shape != ours.shape or not torch.equal(value.to(ours.dtype), ours.cpu()):
                raise UserError(
                    f"{path}: {key} is not the target's own; only modules that share the target's embeddings "
                    "and output head are read"
                )
    for key, value in weights.items():
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"{path}: {key} is {value.dtype}; expected a checkpoint whose modules are not quantised")
    settings = {
        **block_settings(target),
        "native": True,
        "draft_vocab_size": target.vocab_size,
        "layout": layout,
        "num_modules": count,
        "depth": max(3, count),
        "decoder": block_record(config, count),
    }
    return settings, weights
