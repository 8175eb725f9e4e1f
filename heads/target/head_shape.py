"""Shape settings that a head takes from its target."""

from typing import Any

from heads.errors import UserError
from heads.target.families import rope_theta
from heads.target.frozen import FrozenTarget


def check_one_width(target: FrozenTarget, kind: str) -> None:
    """Raise UserError if the widths of the target's output head and layers differ, for heads that start with the output
    head's weights."""
    width = target.lm_head_weight.shape[1]
    if width != target.hidden_size:
        raise UserError(
            f"{target.name}: its embeddings are {width} wide and its hidden states {target.hidden_size}; "
            f"{kind} needs one width, use another target"
        )


def block_settings(target: FrozenTarget, num_heads: int | None = None) -> dict[str, Any]:
    """Return the settings of a `heads.layers.BlockConfig` with the target's shape. `num_heads` overrides the target's
    number of heads."""
    config = target.config
    D, heads = target.hidden_size, num_heads or config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if num_heads is None and heads % key_heads:  # latent attention has no key heads, whatever its config says
        key_heads = heads
    return {
        "hidden_size": D,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "max_position_embeddings": target.context_length,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * D,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": getattr(config, "head_dim", None) or D // heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_theta": rope_theta(config),
    }
