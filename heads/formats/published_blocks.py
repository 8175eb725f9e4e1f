"""Heads that draft a block in the forms of other projects: z-lab, DeepSpec, SpecForge, speculators and Model Optimizer.

They are Qwen3 configs with further fields, at the top level or in `dflash_config`. They number a stream by the layer
that it leaves, which is one less than draftsmith's number; only speculators numbers them as draftsmith does. Embeddings
and output head are the target's.
"""

import re
from collections.abc import Mapping
from math import isclose
from typing import Any, TypeGuard

from torch import Tensor
from torch.nn.functional import pad

from heads.core.errors import UserError, shown
from heads.formats.engine_folder import SGLANG, VLLM, Reading, misread_rotation
from heads.formats.published_eagle3 import sort_vocab
from heads.formats.source import Source, check_same, check_streams, decoder_settings, is_same_table, refuse_settings
from heads.methods.head_shape import spread_layer_ids
from heads.methods.layers import FULL, LAYER_TYPES, SLIDING
from heads.targets.model import FrozenTarget

SCALED = re.compile(r"Gemma\d")
"""Prefixes of the classes of targets that multiply embeddings when they look them up."""
UNSCALED = "reads the embeddings of a Gemma without their factor: another head would run"
ROUNDED = 0.005
"""Relative difference of a factor in 32 bits from the same in bfloat16."""

CONVOLUTION_FIELDS = ("conv_kernel_size", "conv_group_size")
SELECTOR_FIELDS = (*CONVOLUTION_FIELDS, "selector_rank", "selector_top_k")
"""Fields that DFlash2 has and DFlash does not. draftsmith's settings have the same names."""
LATTICE_SIZES = (
    *("lilicorr_candidate_topk", "lilicorr_hidden_size", "lilicorr_num_layers", "lilicorr_num_heads"),
    "lilicorr_factor_dim",
)
LATTICE_FIELDS = (*LATTICE_SIZES, "lilicorr_mlp_ratio", "lilicorr_vector_eps", "lilicorr_logit_scale")
"""Fields of LiLiCorr's lattice. draftsmith's settings have the same names."""
REFINER_FIELDS = ("xpress_rank", "xpress_mlp_hidden")
EMBEDDING_SCALE = "input_embedding_scale"
"""Factor of the target's embeddings that vLLM 0.33.0 reads for a DFlash2 head. SGLang's Gemma scales them itself."""
KINDS = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "lilicorr": "LiLiCorr", "xpress": "XPress"}
"""Kinds, with the names of the methods."""
CLASSES = {
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DFlash2Speculator": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
    "LiLiCorrDraftModel": "lilicorr",
    "Qwen3XPressModel": "xpress",
    "XPressSpeculator": "xpress",
    "XPressDraftModel": "xpress",
}
"""Classes that config.json names in the forms of z-lab, DeepSpec, SpecForge and speculators."""
NEUTRAL = {"output_multiplier": 1, "final_logit_softcapping": 0}
"""Factors of the logits that engines read for a DFlash2 head, with the values at which they have no effect."""
OWN_FIELDS = {
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal", "sample_from_anchor"),
    *("projector_type", "attention_mode", "markov_rank", "markov_head_type", "num_anchors", "shift_label"),
    "use_confidence_head",
    *("use_swa", "swa_window_size", "enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"),
}
"""Fields of `dflash_config` that are read or have no effect. Any other may mean a different head."""
RENAMED = {
    r"^logit_head\.": "",  # in SpecForge's earliest files
    r"^(?=markov_w[12]\.)": "markov_head.",  # in Model Optimizer's, like the next
    r"^confidence_proj\.": "confidence_head.proj.",
    r"^refiner_head\.": "xpress_head.",  # in speculators', like the rest
    r"^xpress_head\.token_embed\.": "xpress_head.w1.",
    r"^xpress_head\.readout\.": "xpress_head.w2.",
    r"^xpress_head\.mix_l$": "xpress_head.mix.L",
    r"^xpress_head\.mlp_(gate|up|down)\.": r"xpress_head.mlp.\1_proj.",
}
"""Patterns of other names of tensors, and what replaces them."""
UNUSED = re.compile(r"verifier_(norm|lm_head)\.weight|(.*\.)?rotary_emb\.inv_freq")
"""Tensors in files that are the target's or have no effect."""


def embedding_scale(architecture: str, width: int) -> float:
    return width**0.5 if SCALED.match(architecture) else 1.0


def is_scaled(own: Mapping[str, Any], architecture: str, width: int) -> bool:
    """True if the fields of a DFlash2 head have the factor of its target's embeddings."""
    found = own.get(EMBEDDING_SCALE, 1.0)
    return isinstance(found, int | float) and isclose(found, embedding_scale(architecture, width), rel_tol=ROUNDED)


def are_layers(ids: Any) -> TypeGuard[list[int]]:
    return isinstance(ids, list) and bool(ids) and all(type(k) is int for k in ids) and sorted(set(ids)) == ids


def block_kind(source: Source) -> str | None:
    """Return the kind of the head in a folder; None if it does not draft a block."""
    speculators = source.config.get("speculators_model_type")
    names = [str(name) for name in source.config.get("architectures") or ()]
    if speculators in KINDS:
        return str(speculators)
    name = next(
        (name for name in names if re.search("dflash|dspark|lilicorr|xpress", f"{name} {speculators}", re.IGNORECASE)),
        None,
    )
    if name is not None and (speculators or name not in CLASSES):
        raise UserError(f"{source.path}: config.json: a {name} is not read here; these are: {', '.join(CLASSES)}")
    nested = source.config.get("dflash_config") or {}
    is_spark = nested.get("projector_type") == "dspark"  # Model Optimizer's have DFlash's class
    return "dspark" if is_spark else None if name is None else CLASSES[name]


def read_block(kind: str, source: Source, target: FrozenTarget) -> Reading | None:
    """Read a head that drafts a block. Every field may be in `dflash_config` or at the top level."""
    if block_kind(source) != kind:
        return None
    raw, path = source.config, source.path
    nested: Mapping[str, Any] = raw.get("dflash_config") or {}
    own = {**raw, **nested}
    layer = raw.get("transformer_layer_config")
    qwen, block = decoder_settings(source, raw if layer is None else layer, "qwen3", target)
    width = own.get("target_hidden_size") or qwen.hidden_size
    check_same(source, target, width=width, vocabulary=qwen.vocab_size, number_of_layers=own.get("num_target_layers"))
    spark, selects = kind == "dspark", kind == "dflash2"
    known = OWN_FIELDS | {*SELECTOR_FIELDS, *NEUTRAL, EMBEDDING_SCALE} if selects else OWN_FIELDS
    known |= {*LATTICE_FIELDS, *CONVOLUTION_FIELDS, "lilicorr_enabled"} if kind == "lilicorr" else set()
    scaled = selects and is_scaled(own, type(target.model).__name__, qwen.hidden_size)
    causal = own.get("causal") if own.get("is_causal") is None else own["is_causal"]
    refuse_settings(
        source,
        {
            "attention_bias": getattr(qwen, "attention_bias", False),
            "target_hidden_size": width != qwen.hidden_size,
            "is_neox_style": own.get("is_neox_style") is False,
            "use_gemma_norm": own.get("use_gemma_norm"),
            "causal": spark and causal,
            # The first DSpark heads of speculators had no such field, and did not sample from the anchor.
            "sample_from_anchor": bool(own.get("sample_from_anchor", spark and layer is None)) is not spark,
            "shift_label": bool(own.get("shift_label", spark)) is not spark,
            "projector_type": own.get("projector_type") not in (None, kind),
            "markov_rank": spark and not own.get("markov_rank"),
            "lilicorr_enabled": kind == "lilicorr" and own.get("lilicorr_enabled") is False,
            **{name: selects and own.get(name) not in (None, neutral) for name, neutral in NEUTRAL.items()},
            EMBEDDING_SCALE: selects and own.get(EMBEDDING_SCALE) is not None and not scaled,
            **{f"dflash_config.{name}": value for name, value in nested.items() if name not in known},
        },
    )
    ids, mask = captured(source, own, target, qwen.num_hidden_layers), own.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise UserError(
            f"{path}: config.json: mask_token_id: expected an id below {target.vocab_size}, the rows of the target's "
            f"embedding, found {shown(mask)}"
        )
    if type(own.get("block_size")) is not int:
        raise UserError(f"{path}: config.json: block_size: expected a number of rows, found {own.get('block_size')!r}")
    config = {
        **block,
        "num_layers": qwen.num_hidden_layers,
        "block_size": own["block_size"],
        "aux_layer_ids": ids,
        "mask_token_id": mask,
        **sliding_layers(source, own, qwen, causal),
    }
    drafted = own.get("draft_vocab_size") or qwen.vocab_size
    if type(drafted) is not int or not 0 < drafted <= qwen.vocab_size:
        raise UserError(
            f"{path}: config.json: draft_vocab_size: expected 1 to {qwen.vocab_size}, the target's tokens, found "
            f"{shown(drafted)}"
        )
    if drafted < qwen.vocab_size:
        config["draft_vocab_size"] = drafted
    weights = block_weights(source, target, drafted)
    if spark:
        name, rank = "confidence_head.proj.weight", own["markov_rank"]
        if (markov := own.get("markov_head_type") or "vanilla") != "vanilla":
            raise UserError(
                f"{path}: config.json: markov_head_type: expected vanilla, the Markov head that engines load, found "
                f"{shown(markov)}"
            )
        config["markov_rank"] = rank
        config |= {"confidence_weight": float(own.get("enable_confidence_head", name in weights))}
        if name in weights and weights[name].shape == (1, qwen.hidden_size):  # it does not read the token before
            weights[name] = pad(weights[name], (0, rank))
    else:
        config["causal"] = bool(causal)
    if kind == "xpress" and "xpress_mlp_ratio" in own:
        own["xpress_mlp_hidden"] = own["xpress_mlp_ratio"] * own.get("xpress_rank", 0)
    needed = {"dflash2": SELECTOR_FIELDS, "lilicorr": LATTICE_FIELDS, "xpress": REFINER_FIELDS}.get(kind, ())
    lacking = [name for name in needed if own.get(name) is None]
    if lacking:
        raise UserError(f"{path}: config.json: {lacking[0]}: expected a number, found none")
    config |= {name: own[name] for name in needed}
    if kind == "lilicorr":
        config["lilicorr_hidden_size"] = own["lilicorr_hidden_size"] or None
        config |= {name: own[name] for name in CONVOLUTION_FIELDS if own.get(name)}
    if kind == "xpress" and own.get("xpress_topc") is not None:
        config["xpress_topc"] = own["xpress_topc"]
    form = ("" if layer is None else "speculators' ") + KINDS[kind]
    return Reading(form, config, weights, tuple(block_misread(source, config, target, scaled=scaled)))


def sliding_layers(source: Source, own: Mapping[str, Any], qwen: Any, causal: bool | None) -> dict[str, Any]:
    """Return the settings of sliding layers; none if no layer slides. `causal`: the config's value for all layers, or
    None. As in vLLM, `use_swa` alone makes all layers slide."""
    types = list(getattr(qwen, "layer_types", None) or [FULL] * qwen.num_hidden_layers)
    if len(types) != qwen.num_hidden_layers or any(kind not in LAYER_TYPES for kind in types):
        raise UserError(
            f"{source.path}: config.json: layer_types: expected {FULL} or {SLIDING} for each of "
            f"{qwen.num_hidden_layers} layers, found {shown(types)}"
        )
    if SLIDING in types:
        sliding_causal = causal is not False and not own.get("sliding_window_non_causal")
    elif own.get("use_swa"):
        types, sliding_causal = [SLIDING] * len(types), bool(causal)
    else:
        return {}
    window = own.get("swa_window_size", getattr(qwen, "sliding_window", None))
    if type(window) is not int or window < 1:
        raise UserError(
            f"{source.path}: config.json: sliding_window: layers slide; expected a number of positions, beside "
            f"use_sliding_window, found {shown(window)}"
        )
    return {"layer_types": types, "sliding_window": window, "sliding_causal": sliding_causal}


def captured(source: Source, own: Mapping[str, Any], target: FrozenTarget, num_layers: int) -> tuple[int, ...]:
    """Return the residual streams that a head reads, numbered by the layer that each enters."""
    name, offset = "target_layer_ids", 1
    if "transformer_layer_config" in own:
        name, offset = "aux_hidden_state_layer_ids", 0
    elif own.get(name) is None:
        return spread_layer_ids(target.num_layers, num_layers)
    ids = own.get(name)
    if not are_layers(ids):
        raise UserError(f"{source.path}: config.json: {name}: expected ascending numbers of layers, found {shown(ids)}")
    entered = tuple(k + offset for k in ids)
    check_streams(source, entered, target)
    return entered


def block_weights(source: Source, target: FrozenTarget, drafted: int) -> dict[str, Tensor]:
    """Return a head's own tensors under their names, with the tables of a vocabulary of `drafted` tokens. Raises
    UserError for embeddings or an output head other than the target's."""
    embed: Any = target.shared.embed_tokens
    found, lm_head = source.read(), target.lm_head_weight
    sort_vocab(source.path, found, target.vocab_size, drafted)
    if drafted < target.vocab_size and "t2d" in found:
        lm_head = lm_head[found["t2d"].to(lm_head.device)]
    shared = {"embed_tokens.weight": embed.weight, "lm_head.weight": lm_head}
    weights = {}
    for name, value in found.items():
        if name in shared and not is_same_table(value, shared[name]):
            raise UserError(
                f"{source.path}: {name} is not the target's own; only heads that share the target's embeddings and "
                "output head are read"
            )
        if name not in shared and not UNUSED.fullmatch(name):
            for pattern, ours in RENAMED.items():
                name = re.sub(pattern, ours, name)
            weights[name] = value
    return weights


def block_misread(source: Source, config: Mapping[str, Any], target: FrozenTarget, *, scaled: bool) -> list[str]:
    """Return a line for each thing that engines read differently from `read_block`. `scaled`: the config has the factor
    of the target's embeddings."""
    raw, said = source.config, misread_rotation(config)
    if SCALED.match(type(target.model).__name__) and not scaled:
        said.append(f"{VLLM} {UNSCALED}")
    if config["num_target_layers"] in config["aux_layer_ids"]:
        said.append(f"{SGLANG} never captures the output of the last layer")
    if 0 in config["aux_layer_ids"]:
        said.append(f"{SGLANG} refuses the embeddings, layer -1, among target_layer_ids")
    if config.get("causal") and not raw.get("is_causal"):
        said.append(f"{SGLANG} reads no causal but is_causal beside the other fields: another head would run")
    full = FULL in config.get("layer_types", [FULL])
    if not config.get("sliding_causal", True) and raw.get("is_causal") is not False:
        said.append(f"{SGLANG} makes sliding layers causal unless is_causal is false: another head would run")
    passes, drafted = raw.get("xpress_num_passes", raw.get("num_jacobi_passes", 6)), config["block_size"] - 1
    if "xpress_rank" in config:
        if passes < drafted:
            said.append(f"{VLLM} drafts {drafted} tokens in {passes} passes, so the last ones may be others than here")
        said.append(f"{SGLANG} does not read XPress")
    if "transformer_layer_config" in raw:
        if "causal" in config and full and raw.get("sliding_window_non_causal") is False:
            said.append(f"{VLLM} makes all layers causal where sliding_window_non_causal is false, the full ones too")
        if "xpress_rank" in config:
            said.append(f"{VLLM} does not read XPress in speculators' form")
        return [*said, f"{SGLANG} does not read speculators' form"]
    if "DSparkDraftModel" in raw["architectures"]:
        said.append(f"{VLLM} takes a DSparkDraftModel for DeepSeek-V4's: Qwen3DSparkModel is its name of this one")
    if "DFlashDraftModel" in raw["architectures"] and "markov_rank" in config:
        said.append("engines take a DFlashDraftModel for DFlash's: Qwen3DSparkModel is their name of this one")
    return said
