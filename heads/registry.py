"""The heads there are, and how one is made for a target."""

from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

from heads.eagle3 import Eagle3, Eagle3Config
from heads.errors import UserError
from heads.families import final_norm_scale
from heads.target import FrozenTarget, check_taps, default_taps
from heads.vocab import build_vocab

HEADS: dict[str, type[Eagle3]] = {"eagle3": Eagle3}

FROM_TARGET = frozenset({"hidden_size", "vocab_size", "num_target_layers", "max_position_embeddings"})
"""Settings that only the target decides; a recipe does not name them."""


def recipe_settings(kind: str) -> list[str]:
    """The names of the settings that a recipe may give a head of this kind."""
    return [field.name for field in fields(HEADS[kind].Config) if field.name not in FROM_TARGET]


def build_head(kind: str, settings: dict[str, Any], target: FrozenTarget, token_counts: Tensor) -> Eagle3:
    """A new head for `target`. `settings` are the recipe's; what it leaves out follows the target's own shape.

    token_counts (V,) int64: how often each target id is a label in the training data; it decides the draft vocabulary.
    """
    config, D = target.config, target.hidden_size
    if target.lm_head_weight.shape[1] != D:
        raise UserError(
            f"{target.name}: its embeddings are {target.lm_head_weight.shape[1]} wide and its hidden states {D}; "
            f"{kind} needs one width, use another target"
        )
    num_heads = settings.get("num_attention_heads") or config.num_attention_heads
    defaults: dict[str, Any] = {
        "hidden_size": D,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "max_position_embeddings": target.context_length,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * D,
        "num_attention_heads": num_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or num_heads,
        "head_dim": getattr(config, "head_dim", None) or D // num_heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_theta": rope_theta(config),
        "draft_vocab_size": min(32_000, target.vocab_size),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    if forbidden := FROM_TARGET & given.keys():
        raise UserError(f"head.{min(forbidden)}: decided by the target; take it out of the recipe")
    taps = check_taps(given.pop("taps"), target.num_layers) if "taps" in given else default_taps(target.num_layers)
    known = HEADS[kind].Config
    missing = [f.name for f in fields(known) if f.default is MISSING and f.name not in {*defaults, *given, "taps"}]
    assert not missing, f"{kind}: no value for {missing}"
    head_config: Eagle3Config = known(**{**defaults, **given, "taps": taps})
    head = HEADS[kind](head_config, *build_vocab(token_counts, head_config.draft_vocab_size))
    norm = final_norm_scale(target.base, target.layers, target.hidden_size)
    head.initialise(target.lm_head_weight, norm, tap_scales(target, taps, token_counts))
    return head


@torch.no_grad()
def tap_scales(target: FrozenTarget, taps: tuple[int, ...], token_counts: Tensor) -> Tensor:
    """(L,) the root mean square of each tapped stream, over tokens drawn as often as they are labels.

    Residual streams grow with depth: in the quickstart's target from 0.26 at the embeddings to 21 at the highest tap.
    A head that starts at that size learns as if its rate were that much smaller.
    """
    draw = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(token_counts.float() + 1e-3, 4 * 64, replacement=True, generator=draw).view(4, 64)
    tokens = tokens.to(target.device)
    positions = torch.arange(64, device=target.device).expand(4, -1)
    streams = target.packed_features(tokens, positions, torch.zeros_like(positions), taps).taps
    by_tap: Tensor = streams.float().unflatten(-1, (len(taps), -1))  # (4, 64, L, D)
    return by_tap.square().mean((0, 1, 3)).sqrt().cpu()


def rope_theta(config: Any) -> float:
    """The target's rotary base; transformers 5 keeps it in `rope_parameters`, by layer type where there are several."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:
        parameters = parameters.get("full_attention", {})
    return float(parameters.get("rope_theta", 10_000.0))
