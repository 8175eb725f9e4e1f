"""The settings that a head takes from its target's shape."""

from typing import Any

from heads.errors import UserError
from heads.target.families import layer_setting, rope_theta
from heads.target.frozen import FrozenTarget


def check_one_width(target: FrozenTarget, kind: str) -> None:
    """Refuse a target whose output head is not as wide as its layers, for heads that start with a copy of its output
    matrix. Raises UserError."""
    width = target.lm_head_weight.shape[1]
    if width != target.hidden_size:
        raise UserError(
            f"{target.name}: its embeddings are {width} wide and its hidden states {target.hidden_size}; "
            f"{kind} needs one width, use another target"
        )


def block_settings(target: FrozenTarget, num_heads: int | None = None) -> dict[str, Any]:
    """Return the settings of a `heads.layers.BlockConfig` of the target's shape. `num_heads` overrides the target's."""
    config = target.config
    D, heads = target.hidden_size, num_heads or layer_setting(config, "num_attention_heads")
    key_heads = layer_setting(config, "num_key_value_heads") or heads
    if num_heads is None and heads % key_heads:  # latent attention has no key heads, whatever its config says
        key_heads = heads
    return {
        "hidden_size": D,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "max_position_embeddings": target.context_length,
        "intermediate_size": layer_setting(config, "intermediate_size") or 4 * D,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": layer_setting(config, "head_dim") or D // heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_theta": rope_theta(config),
    }
