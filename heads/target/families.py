"""Differences between Hugging Face families of causal LMs that matter to a draft head: masks, layers, the output head.

Letters: B batch, N queries, S key slots, D hidden, V vocabulary.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from heads.errors import UserError, first_line
from heads.target.hub import is_here


class MiMoConfig(Qwen2Config):
    """Config of MiMo's checkpoints."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo's model without its prediction modules, which `heads.formats.mtp.read_native` reads."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]  # noqa: RUF012 - as transformers declares it


def register_mimo() -> None:
    """Let transformers load MiMo's checkpoints without the Python code that comes with them."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)


FIXED_ROTATIONS = ("default", "linear", "yarn", "llama3")
"""Kinds of rotary positions whose angles depend on the position alone, not on the length of the text."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "hybrid"}
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid"}
READABLE_LAYERS = ATTENTION_LAYERS | RECURRENT_LAYERS | {"mlp", "moe"}
"""Kinds of layers by their names in a config. "hybrid" is both attention and recurrent. "mlp" and "moe" cache
nothing."""
OTHER_PARTS = re.compile(
    r"(^|\.)(mtp|nextn|visual|vision|image|audio|speech|multi_modal|mm_|talker|token2wav|code2wav)\w*\."
    r"|rotary_emb\.inv_freq$|\.position_ids$|\.(attn|attention)\.(bias|masked_bias)$"
)
MODULE = re.compile(r"(.*\blayers\.(\d+)\.)")
PREDICTION = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""Names that occur in multi-token prediction modules and in no decoder layer. Some families number such modules after
their layers."""


def check_layers(model: PreTrainedModel, config: Any, name: str) -> None:
    """Refuse families whose past is neither masked keys and values nor a state in transformers' cache: chunked
    attention, and recurrent layers with their own cache. Raises UserError."""
    named = set(getattr(config, "layer_types", None) or ())
    kinds = sorted(named - READABLE_LAYERS)
    if not named & ATTENTION_LAYERS and getattr(model, "_is_stateful", False):
        kinds = [*sorted(named), "recurrent state"]
    if kinds:
        raise UserError(
            f"{name}: {config.model_type} has layers of kind {', '.join(kinds)}, whose past cannot be kept here; use a "
            "target with full or sliding-window attention, among which there may be gated delta nets, Mamba or "
            "convolutions"
        )


def check_window(base: nn.Module, config: Any, name: str) -> None:
    """Refuse a sliding window that the decoder's class ignores, with UserError. transformers' own cache would apply it
    and its masks would not, so its output would depend on where the prompt ends."""
    window = layer_setting(config, "sliding_window")
    longest = longest_text(config)
    if not window or getattr(config, "layer_types", None) or (longest is not None and window >= longest):
        return
    code = sys.modules[type(base).__module__]
    if code.__name__.startswith("transformers.") and not hasattr(code, "create_sliding_window_causal_mask"):
        raise UserError(
            f"{name}: its config.json names a sliding_window of {window}, which a {type(base).__name__} does not read; "
            "take it out"
        )


def count_attention(config: Any, num_layers: int) -> int:
    """Return the number of layers with keys and values."""
    kinds = getattr(config, "layer_types", None)
    return num_layers if kinds is None else sum(kind in ATTENTION_LAYERS for kind in kinds)


def unused_weights(unexpected: Iterable[str], num_layers: int) -> list[str]:
    """Return the checkpoint's unused weights that matter: the model, with `num_layers` decoder layers, is wrong without
    them.

    `unexpected`: names that the model's class does not use and does not itself list as ignored. Multi-token prediction
    modules of any family, parts for other modalities, and the masks and frequencies in old checkpoints do not matter.
    """
    names = sorted(unexpected)
    modules = {match[0] for name in names if (match := MODULE.match(name)) and int(match[2]) >= num_layers}
    prediction = {module for module in modules if any(f"{module}{part}" in names for part in PREDICTION)}
    return [
        name
        for name in names
        if not OTHER_PARTS.search(name) and not ((match := MODULE.match(name)) and match[0] in prediction)
    ]


def find_layers(base: nn.Module, num_layers: int, name: str) -> nn.ModuleList:
    """Return the decoder layers: the first module list of the right length. UserError if there is none."""
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UserError(
        f"{name}: {type(base).__name__} holds no list of {num_layers} decoder layers, which heads could read; "
        "use another target"
    )


def final_norm(base: nn.Module, layers: nn.ModuleList, hidden_size: int) -> Any:
    """Return the norm after a decoder's layers; None if none is found."""
    inside = set(layers.modules())
    norms: list[Any] = [m for m in base.modules() if m not in inside and getattr(m, "weight", None) is not None]
    norms = [m for m in norms if m.weight.shape == (hidden_size,)]
    return norms[-1] if norms else None


@torch.no_grad()
def final_norm_scale(base: nn.Module, layers: nn.ModuleList, hidden_size: int) -> Tensor:
    """Return the scale (D,) of the decoder's final norm; ones if no such norm is found.

    The scale is measured on the input +1, -1, +1, ..., which neither RMS nor layer norms change, because some families
    store the scale minus one and some have a bias.
    """
    norm = final_norm(base, layers, hidden_size)
    if norm is None:
        return torch.ones(hidden_size)
    sign = torch.ones_like(norm.weight)
    sign[1::2] = -1
    scale: Tensor = sign * (norm(sign) - norm(-sign)) / 2
    return scale.float().cpu()


def attention_masks(
    config: Any, dtype: torch.dtype, visible: Tensor, positions: Tensor, key_positions: Tensor
) -> Tensor | dict[str, Any]:
    """Return the mask in the form that the family's decoder passes to its layers unchanged. Arguments as in
    `FrozenTarget.features`."""

    def mask(window: int | None) -> Tensor:
        if window is None:
            return additive(visible, dtype)
        return additive(visible & (positions[:, :, None] - key_positions[:, None, :] < window), dtype)

    made: Tensor | dict[str, Any] = masks_by_kind(config, mask)
    return made


def masks_by_kind(config: Any, mask: Callable[[int | None], Any]) -> Any:
    """Return the mask argument of a family's decoder. `mask` makes the mask of a sliding window, or of None.

    Decoders take one mask for all layers, or a dict if they have several kinds of layers. `layer_types` lists the
    layers with the window. Without it, all layers have it.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or {"sliding_attention"})
    if kinds == {"full_attention"} or (window is None and not kinds & RECURRENT_LAYERS):
        return mask(None)
    if kinds == {"sliding_attention"}:
        return mask(window)
    # Recurrent layers need no mask: padding comes after a text.
    return {"full_attention": mask(None), "sliding_attention": mask(window), "linear_attention": None, "conv": None}


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask (B, N, S) bool to (B, 1, N, S) to be added to scores, which every attention kernel supports.

    Eager attention would add a boolean mask as 0 and 1. Masked entries are the most negative finite number, since -inf
    turns a row that sees nothing into NaN.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


class OutputHead:
    """Output head: maps hidden states after the final norm to logits in float32 or wider, with the family's scaling and
    soft cap."""

    def __init__(self, head: Any, config: Any) -> None:
        self.head = head
        factor: float | None = getattr(config, "logit_scale", None) or getattr(config, "output_multiplier", None)
        self.scale: float = factor or 1 / (getattr(config, "logits_scaling", None) or 1.0)
        if getattr(config, "scale_decoder_outputs", False):  # the first version of T5
            self.scale *= config.hidden_size**-0.5
        self.soft_cap: float | None = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden.to(self.head.weight.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def layer_setting(config: Any, name: str) -> Any:
    """Return a setting of a decoder's layers, or None. If layers differ, as in the head widths of Gemma-4, return the
    most frequent value. From 5.24 on, transformers raises an error when such a setting is read from the config."""
    values: Any
    if getattr(config, "is_heterogeneous", False):
        values = [getattr(layer, name, None) for layer in config.per_layer_config]
    else:
        values = getattr(config, name, None)
    if not isinstance(values, list):
        return values
    ((most, _),) = Counter(values).most_common(1)
    return most


def longest_text(config: Any) -> int | None:
    """Return the maximum number of positions of a model; None if it has no limit.

    With LongRoPE, the limit is the original training length. Beyond it, the angles change for all rows of a batch, so
    that a text would depend on the other rows and on drafts.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None) or None
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return longest
    first: int = parameters["original_max_position_embeddings"]
    return first if longest is None else min(first, longest)


def rope_theta(config: Any) -> float:
    """Return the target's rotary base. transformers 5 stores it in `rope_parameters`, per layer type if there are
    several."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:
        parameters = parameters.get("full_attention", {})
    return float(parameters.get("rope_theta", 10_000.0))


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end a generation: from the generation config, which chat models extend, else from the
    model config."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


def check_generation_config(path: str) -> None:
    """Raise UserError if the folder's generation_config.json is damaged. transformers would ignore it, including the
    tokens that end a text."""
    file = Path(path) / "generation_config.json"
    if not is_here(path) or not os.path.lexists(file):
        return
    remedy = "replace it, or delete it so that config.json alone says which tokens end a text"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({first_line(error)}); {remedy}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: expected a JSON object, got {type(found).__name__}; {remedy}")
