"""Differences among Hugging Face families of causal LMs that concern a draft head: masks, layers, the output head.

Letters: B batch, N queries, S key slots, D hidden, V vocabulary.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from heads.errors import UserError


class MiMoConfig(Qwen2Config):
    """The config of MiMo's checkpoints."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The model without its prediction modules, which `heads.formats.mtp.read_native` reads."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]  # noqa: RUF012 - as transformers declares it


def register_mimo() -> None:
    """Let transformers load MiMo's checkpoints without their own code."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)


FIXED_ROTATIONS = ("default", "linear", "yarn", "llama3")
"""Kinds of rotary positions whose angle depends on the position alone, not on how long the text has become."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "hybrid"}
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid"}
READABLE_LAYERS = ATTENTION_LAYERS | RECURRENT_LAYERS | {"mlp", "moe"}
"""Kinds of layers by their names in a config. A hybrid one is both; the last two keep nothing."""
OTHER_PARTS = re.compile(
    r"(^|\.)(mtp|nextn|visual|vision|image|audio|speech|multi_modal|mm_|talker|token2wav|code2wav)\w*\."
    r"|rotary_emb\.inv_freq$|\.position_ids$|\.(attn|attention)\.(bias|masked_bias)$"
)
MODULE = re.compile(r"(.*\blayers\.(\d+)\.)")
PREDICTION = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""Names in a multi-token prediction module that no decoder layer has. Some families number such modules after their
layers."""


def check_layers(model: PreTrainedModel, config: Any, name: str) -> None:
    """Refuse families whose past is neither keys and values behind a mask nor a state that transformers' cache holds:
    chunked attention, recurrent layers with a cache of their own."""
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
    """Refuse a sliding window that the decoder's class does not read. transformers' own cache would have it and its
    masks would not, so that what it generates depends on where the prompt ends."""
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
    """The weights of a checkpoint without which its model, of `num_layers` decoder layers, is another one.

    `unexpected`: those that its class has no place for and does not know itself to be left out. Of no account are
    modules of multi-token prediction, whatever family's, other modalities' parts, and masks and frequencies that old
    checkpoints hold beside the weights.
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
        f"{name}: {type(base).__name__} holds no list of {num_layers} decoder layers, which heads could read; "
        "use another target"
    )


def final_norm(base: nn.Module, layers: nn.ModuleList, hidden_size: int) -> Any:
    """Return the norm behind a decoder's layers; None where no such norm is found."""
    inside = set(layers.modules())
    norms: list[Any] = [m for m in base.modules() if m not in inside and getattr(m, "weight", None) is not None]
    norms = [m for m in norms if m.weight.shape == (hidden_size,)]
    return norms[-1] if norms else None


@torch.no_grad()
def final_norm_scale(base: nn.Module, layers: nn.ModuleList, hidden_size: int) -> Tensor:
    """(D,) what the decoder's final norm multiplies normed states with; ones where no such norm is found.

    The norm is asked by what it makes of +1, -1, +1, ..., which RMS and layer norms alike leave as it is: some families
    store the scale less one, some have a bias.
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
    """Return what a family's decoder takes as its mask, from `mask`, which makes one for a sliding window or None.

    Decoders take one mask for all layers; those with layers of several kinds take a dict. `layer_types` says which
    layers have the window; without it all of them do.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or {"sliding_attention"})
    if kinds == {"full_attention"} or (window is None and not kinds & RECURRENT_LAYERS):
        return mask(None)
    if kinds == {"sliding_attention"}:
        return mask(window)
    # Recurrent layers need no mask: padding stands behind a text.
    return {"full_attention": mask(None), "sliding_attention": mask(window), "linear_attention": None, "conv": None}


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, S) bool -> (B, 1, N, S) to be added to scores, which is what every attention kernel understands.

    Eager attention would add a boolean mask as 0 and 1, and -inf turns a row that sees nothing into NaN.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


class OutputHead:
    """Output head: hidden states after the final norm -> logits in float32 or wider, with the family's scaling and soft
    cap."""

    def __init__(self, head: Any, config: Any) -> None:
        self.head = head
        factor: float | None = getattr(config, "logit_scale", None) or getattr(config, "output_multiplier", None)
        self.scale: float = factor or 1 / (getattr(config, "logits_scaling", None) or 1.0)
        if getattr(config, "scale_decoder_outputs", False):  # T5's first form
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
    """Return a setting of a decoder's layers; None without it. Where layers differ in it, that of most of them:
    transformers from 5.24 on refuses to name one for all, as of the widths of Gemma-4's heads."""
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
    """Return the number of positions that a model reads; None without a limit of its own.

    Of LongRoPE those that it was first trained with: beyond them it turns all rows of a batch by other angles, so that
    a text would depend on its neighbours and on drafts.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None) or None
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return longest
    first: int = parameters["original_max_position_embeddings"]
    return first if longest is None else min(first, longest)


def rope_theta(config: Any) -> float:
    """Return the target's rotary base. transformers 5 keeps it in `rope_parameters`, by layer type if there are
    several."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:
        parameters = parameters.get("full_attention", {})
    return float(parameters.get("rope_theta", 10_000.0))


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end a generation: those of the generation config, which chat models extend, else the model
    config's."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
