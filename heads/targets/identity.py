"""What the texts of a target depend on: its weights, what its config says of the forward pass, and its tokenizer.

Heads, runs, measurements and caches record these, and compare them with those of the target that is open.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from heads.core.errors import shown

SAMPLES = 512
"""Number of weights that are read from each parameter: enough to distinguish fine-tunes, few enough for a 70B model."""
INERT = re.compile(
    r"_|architectures$|auto_map$|chunk_size_feed_forward$|classifier|(torch_)?dtype$|.*dropout|.*drop$"
    r"|.*pdrop$|.*initializer|.*init_std|.*init_device|.*jitter|.*label|.*loss|max_window_layers$|model_type$"
    r"|n_positions$|num_logits_to_keep$|original_max_position_embeddings$|output_(attentions|hidden_states|router_logits)$"
    r"|pretraining_tp$|problem_type$|return_dict$|sliding_window_pattern$|summary_|tie_word_embeddings$"
    r"|.*token_id$|transformers_version$|use_cache$|use_mamba_kernels$|use_sliding_window$|vocab_size$"
)
"""Fields of a config that do not change the forward pass, or only through the weights or other fields (`layer_types`,
`rope_parameters`). Tokens that end a text are compared by themselves."""
INERT_OF_ROTATION = {"type": ..., "mrope_section": ..., "mrope_interleaved": ...}
"""Settings of rotary positions without effect in a text."""
DEFAULTS_OF_ROTATION = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1}


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Return a short hash of the architecture and a sample of every parameter. It is the same for every dtype wider
    than bfloat16."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.is_meta:
            continue
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES]
        digest.update(sample.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def forward_settings(config: PreTrainedConfig) -> dict[str, object]:
    """Return the fields of a model's config that change its forward pass, where they differ from the defaults of the
    config's class, in one spelling."""
    if not config.is_encoder_decoder:  # of a multimodal model, the language model alone
        config = config.get_text_config()
    try:
        defaults = plain(type(config)().to_dict())
    except (TypeError, ValueError):  # a class that has no defaults
        defaults = {}
    settings = plain(config.to_dict())
    known = defaults or settings
    return {
        name: settings[name]
        for name in sorted(known.keys() & settings.keys() | {"quantization_config"} & settings.keys())
        if settings[name] != defaults.get(name) and not INERT.match(name)
    }


def plain(config: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a config as JSON has them, without those that other settings overrule."""
    settings: dict[str, Any] = json.loads(json.dumps(config, default=str), parse_float=number)
    kinds = settings.get("layer_types")
    rotation = settings.get("rope_parameters") or {}
    if kinds and not any("sliding" in kind for kind in kinds):
        settings.pop("sliding_window", None)
    parts = {name: part for name, part in rotation.items() if isinstance(part, dict)} or {"": rotation}
    parts = {name: plain_rotation(part) for name, part in parts.items()}
    if rotation:
        settings["rope_parameters"] = parts.get("", parts)
    if not any(part.get("rope_type") in ("dynamic", "longrope") for part in parts.values()):
        settings.pop("max_position_embeddings", None)  # limits texts, and changes none
    return settings


def number(text: str) -> int | float:
    """Read 4 and 4.0 as one number."""
    value = float(text)
    return int(value) if value.is_integer() else value


def plain_rotation(settings: Mapping[str, object]) -> dict[str, object]:
    if settings.get("rope_type", "default") == "default":
        settings = {name: settings[name] for name in ("rope_theta", "partial_rotary_factor") if name in settings}
    ignored = DEFAULTS_OF_ROTATION | INERT_OF_ROTATION
    kept = {name: value for name, value in settings.items() if ignored.get(name) not in (value, ...)}
    return {name: value for name, value in kept.items() if value is not None}


def leaves(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two records of one target (`FrozenTarget.identity`), each in a few words. Records of
    earlier versions have the fingerprint alone. All quantised forms of a target count as that target."""
    found = []
    prints = [str(each.get("fingerprint") or "").partition("-")[0] for each in (was, now)]
    if all(prints) and prints[0] != prints[1]:
        found.append(f"other weights, of fingerprint {prints[1]} for {prints[0]}")
    settings = [dict(leaves(held)) for each in (was, now) if isinstance(held := each.get("settings"), Mapping)]
    if len(settings) == 2:
        first, second = settings
        for name in sorted(first.keys() | second.keys()):
            if first.get(name) != second.get(name):
                before, after = (shown(each[name]) if name in each else "its default" for each in (first, second))
                found.append(f"config.json: {name} was {before}, is {after}")
    if len({each.get("tokenizer") for each in (was, now)} - {None, ""}) == 2:
        found.append("another tokenizer")
    return found
