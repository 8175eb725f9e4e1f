"""Differences among Hugging Face families of causal LMs that matter to a draft head: masks, layers, the output head.

Letters: B batch, N queries, S key slots, D hidden, V vocabulary.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from heads.errors import UserError


class MiMoConfig(Qwen2Config):
    """Config of MiMo's checkpoints."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo without its prediction modules, which `heads.formats.mtp.read_native` reads."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]  # noqa: RUF012 - as transformers declares it


def register_mimo() -> None:
    """Register MiMo, so that transformers loads its checkpoints without their own code."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)


FIXED_ROTATIONS = ("default", "linear", "yarn", "llama3")
"""Rotary embedding types whose angles depend only on the position, not on the current length of the text."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "hybrid"}
RECURRENT_LAYERS = {"linear_attention", "hybrid"}
READABLE_LAYERS = ATTENTION_LAYERS | RECURRENT_LAYERS | {"mlp", "moe"}
"""Supported layer types, by their names in a config. A hybrid layer has attention and a recurrent state. `mlp` and
`moe` layers have no cache."""
OTHER_PARTS = re.compile(
    r"(^|\.)(mtp|nextn|visual|vision|image|audio|speech|multi_modal|mm_|talker|token2wav|code2wav)\w*\."
    r"|rotary_emb\.inv_freq$|\.position_ids$|\.(attn|attention)\.(bias|masked_bias)$"
)
MODULE = re.compile(r"(.*\blayers\.(\d+)\.)")
PREDICTION = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""Weights of multi-token prediction modules that no decoder layer has. Some families number such modules as layers
after their decoder layers."""


def check_layers(model: PreTrainedModel, config: Any, name: str) -> None:
    """Raise UserError for families whose layers keep neither maskable keys and values nor a state in transformers'
    cache, such as chunked attention and recurrent layers with their own cache."""
    named = set(getattr(config, "layer_types", None) or ())
    kinds = sorted(named - READABLE_LAYERS)
    if not named & ATTENTION_LAYERS and getattr(model, "_is_stateful", False):
        kinds = [*sorted(named), "recurrent state"]
    if kinds:
        raise UserError(
            f"{name}: {config.model_type} has layers of kind {', '.join(kinds)}, whose past cannot be kept here; use a "
            "target with full or sliding-window attention, among which there may be gated delta nets or Mamba layers"
        )


def count_attention(config: Any, num_layers: int) -> int:
    """Return the number of layers with keys and values."""
    kinds = getattr(config, "layer_types", None)
    return num_layers if kinds is None else sum(kind in ATTENTION_LAYERS for kind in kinds)


def unused_weights(unexpected: Iterable[str], num_layers: int) -> list[str]:
    """Return the unexpected weights of a checkpoint that change the model if they are dropped.

    `unexpected`: names that the model's class, with `num_layers` decoder layers, neither uses nor declares as ignored.
    Multi-token prediction modules of any family, parts of other modalities, and masks and frequencies in old
    checkpoints may be dropped.
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
    """Return the decoder layers: the first module list of the right length."""
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UserError(
        f"{name}: {type(base).__name__} holds no list of {num_layers} decoder layers; it cannot be auxiliary"
    )


def final_norm(base: nn.Module, layers: nn.ModuleList, hidden_size: int) -> Any:
    """Return the norm after a decoder's layers, or None if there is none."""
    inside = set(layers.modules())
    norms: list[Any] = [m for m in base.modules() if m not in inside and getattr(m, "weight", None) is not None]
    norms = [m for m in norms if m.weight.shape == (hidden_size,)]
    return norms[-1] if norms else None


@torch.no_grad()
def final_norm_scale(base: nn.Module, layers: nn.ModuleList, hidden_size: int) -> Tensor:
    """Return the scale (D,) of the decoder's final norm; ones if there is no such norm.

    The scale is measured on the input +1, -1, +1, ..., which both RMS and layer norms leave unchanged, since some
    families store the scale minus one and some have a bias.
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
    """Return the mask that the family's decoder passes to its layers unchanged; arguments as in
    `FrozenTarget.features`."""

    def mask(window: int | None) -> Tensor:
        if window is None:
            return additive(visible, dtype)
        return additive(visible & (positions[:, :, None] - key_positions[:, None, :] < window), dtype)

    made: Tensor | dict[str, Any] = masks_by_kind(config, mask)
    return made


def masks_by_kind(config: Any, mask: Callable[[int | None], Any]) -> Any:
    """Return the mask argument of a family's decoder. `mask` makes a mask for a sliding window, or for None.

    Decoders take one mask for all layers, or a dict if they have several kinds of layers. `layer_types` names the
    layers with a window; without it, all layers have one.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or {"sliding_attention"})
    if kinds == {"full_attention"} or (window is None and not kinds & RECURRENT_LAYERS):
        return mask(None)
    if kinds == {"sliding_attention"}:
        return mask(window)
    # Recurrent layers need no mask, since padding is after the text.
    return {"full_attention": mask(None), "sliding_attention": mask(window), "linear_attention": None}


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask (B, 1, N, S) to add to scores, which every attention kernel supports, for visible (B, N, S) bool.

    Eager attention would add a boolean mask as 0 and 1. -inf would turn a row that sees nothing into NaN.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


class OutputHead:
    """Output head, with the family's scaling and soft cap: hidden states after the final norm -> logits in float32 or
    wider."""

    def __init__(self, head: Any, config: Any) -> None:
        self.head = head
        self.scale: float = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
        if getattr(config, "scale_decoder_outputs", False):  # the original T5
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


def rope_theta(config: Any) -> float:
    """Return the target's rotary base. transformers 5 stores it in `rope_parameters`, per layer type if there are
    several."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:
        parameters = parameters.get("full_attention", {})
    return float(parameters.get("rope_theta", 10_000.0))


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end a generation: those of the generation config, where chat models add some, else
    those of the model config."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
