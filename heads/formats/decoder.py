"""Decoder of a head that another project saved: its settings, and comparison with the target's own tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from heads.errors import UserError, first_line
from heads.formats.source import Source
from heads.target.families import FIXED_ROTATIONS
from heads.target.model import FrozenTarget


def decoder_settings(source: Source, said: Mapping[str, Any], kind: str, target: FrozenTarget) -> tuple[Any, Any]:
    """Return the transformers config for the part `said` of config.json, of type `kind` if it names none, and the
    settings of a `heads.layers.BlockConfig` for it, with `rope_scaling` None for plain positions."""
    try:
        config: Any = AutoConfig.for_model(**{"model_type": kind, **said})
        rope = dict(config.rope_parameters or {})
        theta, scaled = float(rope.pop("rope_theta", 10_000.0)), rope.get("rope_type", "default")
        block = {
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_target_layers": target.num_layers,
            "max_position_embeddings": config.max_position_embeddings,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": theta,
            "rope_scaling": None if scaled == "default" else rope,
        }
    except Exception as error:  # each family's config refuses in its own way
        raise UserError(f"{source.path}: config.json describes no decoder layer ({first_line(error)})") from error
    unread = {
        "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
        "rope_parameters": scaled not in FIXED_ROTATIONS or rope.get("partial_rotary_factor", 1) != 1,
    }
    refuse_settings(source, unread)
    return config, block


def refuse_settings(source: Source, unread: Mapping[str, Any]) -> None:
    """Raise UserError for a setting of config.json that heads here do not support. `unread` is true for those that are
    set."""
    for name, is_set in unread.items():
        if is_set:
            raise UserError(f"{source.path}: config.json: {name}: heads with such a setting are not read here")


def check_streams(source: Source, ids: Sequence[int], target: FrozenTarget) -> None:
    """Raise UserError for residual streams, numbered by the layer that they enter, that the target does not have."""
    if not all(0 <= k <= target.num_layers for k in ids):
        raise UserError(
            f"{source.path}: reads the streams that enter layers {list(ids)}, but {target.name} has "
            f"{target.num_layers} layers; measure it on its own target"
        )


def is_same_table(found: Tensor, ours: Tensor) -> bool:
    """Return True if `found` is the target's own table, in whatever precision either of the two was saved."""
    ours = ours.detach().cpu()
    if found.shape != ours.shape:
        return False
    return torch.equal(found.to(ours.dtype), ours) or torch.equal(ours.to(found.dtype), found)
