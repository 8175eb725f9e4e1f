"""Heads that draft a block in the forms of other projects: z-lab, DeepSpec, SpecForge, speculators and Model Optimizer.

They are Qwen3 configs with further fields, at the top level or in `dflash_config`. They number a stream by the layer
that it leaves, which is one less than draftsmith's number; only speculators numbers them as draftsmith does. Embeddings
and output head are the target's.
"""

import re
from collections.abc import Mapping
from math import isclose
from typing import Any

from torch import Tensor

from heads.blocks.block_config import BlockForm, DraftBlockConfig
from heads.blocks.block_heads import BLOCK_HEADS
from heads.core.engines import SGLANG, VLLM, misread_rotation
from heads.core.errors import UserError, expect
from heads.foreign.published_eagle3 import sort_vocab
from heads.foreign.published_files import (
    Reading,
    Source,
    check_same,
    check_streams,
    decoder_settings,
    is_same_table,
    refuse_settings,
)
from heads.parts.head_shape import spread_layer_ids
from heads.parts.layers import FULL, SLIDING
from heads.targets.frozen_target import FrozenTarget

SCALED = re.compile(r"Gemma\d")
"""Prefixes of the classes of targets that multiply embeddings when they look them up."""
UNSCALED = "reads the embeddings of a Gemma without their factor: another head would run"
EMBEDDING_SCALE = "input_embedding_scale"
"""Factor of the target's embeddings that vLLM 0.33.0 reads for a DFlash2 head. SGLang's Gemma scales them itself."""
FIELDS = {
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal", "sample_from_anchor"),
    *("projector_type", "attention_mode", "markov_rank", "markov_head_type", "num_anchors", "shift_label"),
    *("use_swa", "swa_window_size", "enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"),
    "use_confidence_head",
}
"""Fields of `dflash_config` that are read or have no effect. Any other may mean a different head."""
UNUSED = re.compile(r"verifier_(norm|lm_head)\.weight|(.*\.)?rotary_emb\.inv_freq")
"""Tensors in files that are the target's or have no effect."""


def embedding_scale(architecture: str, width: int) -> float:
    return width**0.5 if SCALED.match(architecture) else 1.0


def block_kind(source: Source) -> str | None:
    """Return the kind of the head in a folder; None if it does not draft a block."""
    config = source.config
    speculators = config.get("speculators_model_type")
    # Other kinds' heads may have DFlash's class, and are known by their projector.
    for kind in (speculators, (config.get("dflash_config") or {}).get("projector_type")):
        if kind in BLOCK_HEADS:
            return str(kind)
    classes = {name: kind for kind, head in reversed(BLOCK_HEADS.items()) for name in head.Config.form.classes}
    kinds = re.compile("|".join(BLOCK_HEADS), re.IGNORECASE)
    names = [str(name) for name in config.get("architectures") or () if kinds.search(f"{name} {speculators}")]
    if names and (speculators or names[0] not in classes):
        raise UserError(f"{source.path}: config.json: a {names[0]} is not read here; these are: {', '.join(classes)}")
    return classes[names[0]] if names else None


def read_block(method: type[DraftBlockConfig], source: Source, target: FrozenTarget) -> Reading | None:
    """Read a head that drafts a block. Every field may be in `dflash_config` or at the top level."""
    form = method.form
    raw = source.config
    kind = form.title.lower()
    if block_kind(source) != kind:
        return None
    layer = raw.get("transformer_layer_config")
    qwen, decoder = decoder_settings(source, raw if layer is None else layer, "qwen3", target)
    of_layer = {"hidden_size": qwen.hidden_size, "attention_bias": getattr(qwen, "attention_bias", False)}
    fields = {**raw, **of_layer, **(raw.get("dflash_config") or {})}
    width = fields.get("target_hidden_size") or qwen.hidden_size
    layers = fields.get("num_target_layers")
    check_same(source, target, width=width, vocabulary=qwen.vocab_size, number_of_layers=layers)
    causal = fields.get("causal") if fields.get("is_causal") is None else fields["is_causal"]
    refuse_unsupported(source, fields, method, causal, target)
    drafted = fields.get("draft_vocab_size") or qwen.vocab_size
    weights = block_weights(source, form, target, drafted)
    try:
        config = {
            **decoder,
            "num_layers": qwen.num_hidden_layers,
            "block_size": fields.get("block_size"),
            "aux_layer_ids": captured(fields, target.num_layers, qwen.num_hidden_layers),
            "mask_token_id": fields.get("mask_token_id"),
            **sliding_layers(fields, qwen, causal),
            **({"draft_vocab_size": drafted} if drafted < qwen.vocab_size else {}),
            **({"causal": bool(causal)} if method.spare_rows else {}),
            **method.read_fields(fields, weights),
        }
    except UserError as error:
        raise UserError(f"{source.path}: config.json: {error}") from error
    check_streams(source, config["aux_layer_ids"], target)
    title = form.title if layer is None else f"speculators' {form.title}"
    return Reading(title, config, weights, tuple(block_misread(fields, config, form, target)))


def refuse_unsupported(
    source: Source,
    fields: Mapping[str, Any],
    method: type[DraftBlockConfig],
    causal: bool | None,
    target: FrozenTarget,
) -> None:
    """Raise UserError for settings that heads of a method do not support here."""
    form = method.form
    from_root = not method.spare_rows
    known = FIELDS | {*form.settings, *form.optional, *form.neutral}
    known |= {EMBEDDING_SCALE} if form.scales_embeddings else set()
    # The first DSpark heads of speculators had no such field, and did not sample from the anchor.
    by_default = from_root and "transformer_layer_config" not in fields
    nested: Mapping[str, object] = fields.get("dflash_config") or {}
    refuse_settings(
        source,
        {
            "attention_bias": fields["attention_bias"],
            "target_hidden_size": fields.get("target_hidden_size") not in (None, fields["hidden_size"]),
            "is_neox_style": fields.get("is_neox_style") is False,
            "use_gemma_norm": fields.get("use_gemma_norm"),
            "causal": from_root and causal,
            "sample_from_anchor": bool(fields.get("sample_from_anchor", by_default)) is not from_root,
            "shift_label": "shift_label" not in form.settings
            and bool(fields.get("shift_label", from_root)) is not from_root,
            "projector_type": fields.get("projector_type") not in (None, form.title.lower()),
            **{name: fields.get(name) not in (None, value) for name, value in form.neutral.items()},
            EMBEDDING_SCALE: form.scales_embeddings and EMBEDDING_SCALE in fields and not has_scale(fields, target),
            **{f"dflash_config.{name}": value for name, value in nested.items() if name not in known},
        },
    )


def has_scale(fields: Mapping[str, Any], target: FrozenTarget) -> bool:
    """Return True if config.json has the factor of the target's embeddings, which may be rounded to bfloat16."""
    scale = embedding_scale(type(target.model).__name__, target.hidden_size)
    return isclose(fields.get(EMBEDDING_SCALE, 1.0), scale, rel_tol=0.005)


def sliding_layers(fields: Mapping[str, object], qwen: Any, causal: bool | None) -> dict[str, object]:
    """Return the settings of sliding layers; none if no layer slides. `causal`: the config's value for all layers, or
    None. As in vLLM, `use_swa` alone makes all layers slide."""
    types = list(getattr(qwen, "layer_types", None) or [FULL] * qwen.num_hidden_layers)
    if SLIDING in types:
        sliding_causal = causal is not False and not fields.get("sliding_window_non_causal")
    elif fields.get("use_swa"):
        types = [SLIDING] * len(types)
        sliding_causal = bool(causal)
    else:
        return {}
    window = fields.get("swa_window_size", getattr(qwen, "sliding_window", None))
    what = "a number of positions, beside use_sliding_window, because layers slide"
    expect(type(window) is int and window > 0, "sliding_window", what, window)
    return {"layer_types": types, "sliding_window": window, "sliding_causal": sliding_causal}


def captured(fields: Mapping[str, Any], target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return the residual streams that a head reads, numbered by the layer that each enters."""
    name = "target_layer_ids"
    offset = 1
    if "transformer_layer_config" in fields:
        name = "aux_hidden_state_layer_ids"
        offset = 0
    elif fields.get(name) is None:
        return spread_layer_ids(target_layers, num_layers)
    ids = fields.get(name) or []
    expect(bool(ids) and sorted(set(ids)) == ids, name, "ascending numbers of layers", ids)
    return tuple(k + offset for k in ids)


def block_weights(source: Source, form: BlockForm, target: FrozenTarget, drafted: int) -> dict[str, Tensor]:
    """Return a head's own tensors under their names, with the tables of a vocabulary of `drafted` tokens. Raises
    UserError for embeddings or an output head other than the target's."""
    embed: Any = target.shared.embed_tokens
    found = source.read()
    lm_head = target.lm_head_weight
    sort_vocab(source.path, found, target.vocab_size, drafted)
    if drafted < target.vocab_size and "t2d" in found:
        lm_head = lm_head[found["t2d"].to(lm_head.device)]
    shared = {"embed_tokens.weight": embed.weight, "lm_head.weight": lm_head}
    renamed = {r"^logit_head\.": "", **form.renamed}  # the first is of SpecForge's earliest files
    weights = {}
    for name, value in found.items():
        if name in shared and not is_same_table(value, shared[name]):
            raise UserError(
                f"{source.path}: {name} is not the target's own; only heads that share the target's embeddings and "
                "output head are read"
            )
        if name not in shared and not UNUSED.fullmatch(name):
            for pattern, ours in renamed.items():
                name = re.sub(pattern, ours, name)
            weights[name] = value
    return weights


def block_misread(
    fields: Mapping[str, Any], config: Mapping[str, Any], form: BlockForm, target: FrozenTarget
) -> list[str]:
    """Return a line for each thing that engines read differently from `read_block`."""
    of_speculators = "transformer_layer_config" in fields
    classes = () if of_speculators else fields["architectures"]
    passes = fields.get("xpress_num_passes", fields.get("num_jacobi_passes", 6))
    drafted = config["block_size"] - 1
    scaled = form.scales_embeddings and has_scale(fields, target)
    all_causal = "causal" in config and FULL in config.get("layer_types", [FULL])
    lines = [
        (SCALED.match(type(target.model).__name__) and not scaled, f"{VLLM} {UNSCALED}"),
        (
            config["num_target_layers"] in config["aux_layer_ids"],
            f"{SGLANG} never captures the output of the last layer",
        ),
        (0 in config["aux_layer_ids"], f"{SGLANG} refuses the embeddings, layer -1, among target_layer_ids"),
        (
            config.get("causal") and not fields.get("is_causal"),
            f"{SGLANG} reads no causal but is_causal beside the other fields: another head would run",
        ),
        (
            not config.get("sliding_causal", True) and fields.get("is_causal") is not False,
            f"{SGLANG} makes sliding layers causal unless is_causal is false: another head would run",
        ),
        (
            form.fixed_depth and passes < drafted,
            f"{VLLM} drafts {drafted} tokens in {passes} passes, so the last ones may be others than here",
        ),
        (not form.in_sglang, f"{SGLANG} does not read {form.title}"),
        (not form.in_vllm, f"{VLLM} does not read {form.title}"),
        (
            of_speculators and all_causal and fields.get("sliding_window_non_causal") is False,
            f"{VLLM} makes all layers causal where sliding_window_non_causal is false, the full ones too",
        ),
        (of_speculators and form.fixed_depth, f"{VLLM} does not read {form.title} in speculators' form"),
        (of_speculators, f"{SGLANG} does not read speculators' form"),
        (
            "DSparkDraftModel" in classes,
            f"{VLLM} takes a DSparkDraftModel for DeepSeek-V4's: Qwen3DSparkModel is its name of this one",
        ),
        (
            form.algorithm == "dspark" and "DFlashDraftModel" in classes,
            "engines take a DFlashDraftModel for DFlash's: Qwen3DSparkModel is their name of this one",
        ),
    ]
    return misread_rotation(config) + [line for applies, line in lines if applies]
