"""Differences between Hugging Face families of causal LMs that matter to a draft head: layers, output head, lengths.

Letters: D hidden.
"""

import sys
from collections import Counter
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from heads.core.errors import UserError


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo's model without its prediction modules, which `heads.methods.mtp_names.read_native` reads."""

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


def check_layers(model: PreTrainedModel, config: Any, name: str) -> None:
    """Reject families whose past is neither masked keys and values nor a state in transformers' cache: chunked
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


def check_window(base: nn.Module, config: object, name: str) -> None:
    """Reject a sliding window that the decoder's class ignores, with UserError. transformers' own cache would apply it
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
        self.narrow: OutputHead | None = None

    def in_dtype(self, dtype: torch.dtype) -> "OutputHead":
        """Return the output head with weights of this dtype, copied at the first call."""
        if self.head.weight.dtype == dtype:
            return self
        if self.narrow is None:
            self.narrow = copy(self)
            self.narrow.head = deepcopy(self.head).to(dtype)
        return self.narrow

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
    values: object
    if getattr(config, "is_heterogeneous", False):
        values = [getattr(layer, name, None) for layer in config.per_layer_config]
    else:
        values = getattr(config, name, None)
    if not isinstance(values, list):
        return values
    ((most, _),) = Counter(values).most_common(1)
    return most


def attention_widths(config: Any, hidden_size: int) -> tuple[int, int, int, int]:
    """Return the widths of a key and of a value of one head, and the numbers of query heads and of key heads."""
    heads: int = layer_setting(config, "num_attention_heads")
    width: int = layer_setting(config, "head_dim") or hidden_size // heads
    key_heads: int = layer_setting(config, "num_key_value_heads") or heads
    nope = getattr(config, "qk_nope_head_dim", None)
    if nope is None:
        return width, width, heads, key_heads
    return nope + config.qk_rope_head_dim, config.v_head_dim, heads, heads  # latent attention


def longest_text(config: object) -> int | None:
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


def rope_parameters(config: object) -> dict[str, Any]:
    """Return the settings of the target's rotary positions, those of its full attention if its layers differ."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters if "rope_theta" in parameters else parameters.get("full_attention") or {}


def rope_theta(config: object) -> float:
    return float(rope_parameters(config).get("rope_theta", 10_000.0))


def rope_scaling(config: object) -> dict[str, Any] | None:
    """Return the scaling of the target's rotary positions, without the base; None for plain ones.

    Plain are also: positions of images (for text); `dynamic` ones, which are scaled only beyond
    `max_position_embeddings`, where texts end here; and `proportional` ones, which rotate a part of each head.
    """
    parameters = rope_parameters(config)
    if parameters.get("rope_type") not in ("linear", "yarn", "llama3", "longrope"):
        return None
    others = ("type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
    return {name: value for name, value in parameters.items() if name not in others and value is not None}


def eos_ids(*sources: object) -> tuple[int, ...]:
    """Return the tokens that end a text, of all `sources` (configs, generation configs, tokenizers; None has none)."""
    tokens: dict[int, None] = {}
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        tokens |= dict.fromkeys(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return tuple(tokens)
