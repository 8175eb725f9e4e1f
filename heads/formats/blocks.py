"""Folders of heads that draft a block: config.json as vLLM and SGLang read it, and the tensors under the names that
they load; and those of z-lab, DeepSpec, SpecForge and speculators.

All are Qwen3 configs with further fields: in `dflash_config` for DFlash and DFlash2, at the top level for DSpark; heads
of other projects may have them in either place. They number a stream by the layer that it leaves, which is one less
than draftsmith's number; only speculators numbers them as draftsmith does. Embeddings and output head are the target's,
and not in the file; SGLang supports no draft vocabulary here.

Letters: D hidden, V vocabulary, L auxiliary layers, r rank of what the token before adds to the logits.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isclose
from typing import Any, TypeGuard

from torch import Tensor
from torch.nn.functional import pad

from heads.core.errors import UserError, shown
from heads.formats.eagle3 import HOOKS_OF_BOTH, HOOKS_OF_VLLM, MULTIMODAL, hooked, sort_vocab
from heads.formats.engine import (
    DECODER_SIZES,
    SGLANG,
    VLLM,
    Folder,
    Format,
    Reading,
    Shapes,
    attention,
    decoder_config,
    fields,
    gated_mlp,
    rotation_faults,
    sglang,
    sizes,
    tensors,
    vllm,
)
from heads.formats.source import Source, check_same, check_streams, decoder_settings, is_same_table, refuse_settings
from heads.methods.head_shape import spread_layer_ids
from heads.methods.layers import FULL, LAYER_TYPES, SLIDING
from heads.targets.model import FrozenTarget

HOOKS_OF_SGLANG = """
Beam DeepseekV2 DeepseekV3 Gemma4 Glm4MoeLite GptOss InternLM3 Laguna Lfm2 Lfm2Moe Llama Mellum MiMoV2 MiMoV2Flash
Ministral3 Mistral MistralLarge3 NemotronH Phi3 Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe
"""
MULTIMODAL_OF_SGLANG = """
Gemma4 Gemma4Unified Kimi_K25 Lfm2Vl MiniCPMV4_6 MiniCPMV4_7 MiniMaxM3Sparse MuseGlimmer MuseSpark Qwen3VLMoe Qwen3_5
Qwen3_5Moe
"""
"""Multimodal classes with the hook for block heads. Qwen3-VL is not among them: its hook calls a method that its dense
language model does not have."""
TARGETS = {
    VLLM: hooked(HOOKS_OF_BOTH, HOOKS_OF_VLLM, multimodal=MULTIMODAL[VLLM]),
    SGLANG: hooked(HOOKS_OF_SGLANG, multimodal=MULTIMODAL_OF_SGLANG) | {"NemotronH_Omni_Reasoning_V3"},
}
"""Classes of targets whose residual streams the engine passes to such a head."""


SCALED = re.compile(r"Gemma\d")
"""Prefixes of the classes of targets that multiply embeddings when they look them up."""
UNSCALED = "reads the embeddings of a Gemma without their factor: another head would run"
ROUNDED = 0.005
"""Relative difference of a factor in 32 bits from the same in bfloat16."""

KINDS = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
"""Kinds, with the names of the methods."""
CLASSES = {
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DFlash2Speculator": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
}
"""Classes that config.json names in the forms of z-lab, DeepSpec, SpecForge and speculators."""
SELECTOR_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Fields that DFlash2 has and DFlash does not. draftsmith's settings have the same names."""
EMBEDDING_SCALE = "input_embedding_scale"
"""Factor of the target's embeddings that vLLM 0.33.0 reads for a DFlash2 head. SGLang's Gemma scales them itself."""
NEUTRAL = {"output_multiplier": 1, "final_logit_softcapping": 0}
"""Factors of the logits that engines read for a DFlash2 head, with the values at which they have no effect."""
OWN_FIELDS = {
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal", "sample_from_anchor"),
    *("projector_type", "attention_mode", "markov_rank", "markov_head_type", "num_anchors"),
    *("use_swa", "swa_window_size", "enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"),
}
"""Fields of `dflash_config` that are read or have no effect. Any other may mean a different head."""
UNUSED = re.compile(r"verifier_(norm|lm_head)\.weight|(.*\.)?rotary_emb\.inv_freq")
"""Tensors in files that are the target's or have no effect."""


def embedding_scale(architecture: str, width: int) -> float:
    return width**0.5 if SCALED.match(architecture) else 1.0


def is_scaled(own: Mapping[str, Any], architecture: str, width: int) -> bool:
    """True if the fields of a DFlash2 head have the factor of its target's embeddings."""
    found = own.get(EMBEDDING_SCALE, 1.0)
    return isinstance(found, int | float) and isclose(found, embedding_scale(architecture, width), rel_tol=ROUNDED)


QWEN3_FIELDS: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def qwen3_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {
        **QWEN3_FIELDS,
        **decoder_config(config, target, dtype),
        "num_hidden_layers": config.num_layers,
        "layer_types": [*config.kinds],
        "use_sliding_window": SLIDING in config.kinds,
        "sliding_window": config.sliding_window,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
    }


def dflash_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        **qwen3_config(config, target, dtype),
        **causality("is_causal", config),
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [k - 1 for k in config.aux_layer_ids],
            **causality("causal", config),
        },
    }


def dflash2_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    made = dflash_engine_config(config, target, dtype)
    own = {name: getattr(config, name) for name in ("block_size", *SELECTOR_FIELDS)}
    scale = embedding_scale(str(target.get("architecture")), config.hidden_size)
    own |= {EMBEDDING_SCALE: scale} if scale != 1 else {}
    return {**made, "architectures": ["DFlash2DraftModel"], "dflash_config": {**made["dflash_config"], **own}}


def causality(name: str, config: Any) -> dict[str, bool]:
    """Return the field `name`, which says whether all layers are causal within a block. Return nothing if only sliding
    layers are causal, which engines infer from the types of layers."""
    by_type = SLIDING in config.kinds and config.sliding_causal and not config.causal
    return {} if by_type else {name: config.causal}


def dspark_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        **qwen3_config(config, target, dtype),
        **({} if config.sliding_causal else {"is_causal": False}),
        "target_layer_ids": [k - 1 for k in config.aux_layer_ids],
        "mask_token_id": config.mask_token_id,
        "num_anchors": config.num_anchors,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence_weight > 0,
        "confidence_head_with_markov": config.confidence_weight > 0,
        "sample_from_anchor": True,
    }


SIZES = (*DECODER_SIZES, "num_hidden_layers", "block_size", "num_target_layers")


def are_layers(ids: Any) -> TypeGuard[list[int]]:
    return isinstance(ids, list) and bool(ids) and all(type(k) is int for k in ids) and sorted(set(ids)) == ids


@dataclass(frozen=True)
class BlockForm:
    """Folder of one of the three methods."""

    architecture: str
    nested: bool
    """True if the method's own fields are in `dflash_config`."""
    sizes: tuple[str, ...] = ()
    """Names of further sizes among the method's own fields."""
    markov: bool = False
    selector: bool = False

    def tensors(self, c: Mapping[str, Any], own: Mapping[str, Any], ids: list[int]) -> Shapes:
        """Return the shapes of the tensors of a head with this config.json."""
        D, V, d = c["hidden_size"], c["vocab_size"], c["head_dim"]
        shapes: Shapes = {"fc.weight": (D, len(ids) * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
        for layer in (f"layers.{i}" for i in range(c["num_hidden_layers"])):
            shapes |= {f"{layer}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
            shapes |= {f"{layer}.self_attn.{name}.weight": (d,) for name in ("q_norm", "k_norm")}
            shapes |= attention(f"{layer}.self_attn", c, D) | gated_mlp(f"{layer}.mlp", D, c["intermediate_size"])
            if self.selector:
                taps, groups = own["conv_kernel_size"], D // own["conv_group_size"]
                for conv in (f"{layer}.attention_conv", f"{layer}.mlp_conv"):
                    shapes[f"{conv}.base_kernel"] = (2, taps, D)
                    shapes[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, D)
        if self.selector:
            r = own["selector_rank"]
            shapes |= {f"candidate_selector.{name}_codebook": (V, r) for name in ("predecessor", "successor")}
            shapes["candidate_selector.hidden_projection.weight"] = (r, D)
        if self.markov:
            shapes |= {f"markov_head.markov_w{i}.weight": (V, c["markov_rank"]) for i in (1, 2)}
            if c.get("enable_confidence_head"):
                shapes |= {"confidence_head.proj.weight": (1, D + c["markov_rank"]), "confidence_head.proj.bias": (1,)}
        return shapes

    def check(self, folder: Folder, reader: str) -> tuple[str | None, list[str]]:
        config, target = folder.config, folder.target
        name = str(target.get("architecture"))
        lacks = None if name in TARGETS[reader] else f"hands no residual streams of a {name} to a head of this kind"
        if lacks is None and reader == VLLM and SCALED.match(name) and not self.selector:
            lacks = UNSCALED
        own = config.get("dflash_config", {}) if self.nested else config
        where = "dflash_config." if self.nested else ""
        faults = fields(config, {"architectures": [self.architecture]} | QWEN3_FIELDS)
        faults += fields(config, {name: target[name] for name in ("hidden_size", "vocab_size")})
        faults += fields(config, {"num_target_layers": target["num_layers"]})
        faults += sizes(config, SIZES) + sizes(own, self.sizes, where)
        ids: Any = own.get("target_layer_ids")
        if not are_layers(ids):
            faults.append(f"config.json: {where}target_layer_ids: expected ascending numbers of layers, found {ids!r}")
        if faults:
            return lacks, faults
        last = target["num_layers"] - 1
        if ids[0] < 0 or ids[-1] >= last:
            faults.append(
                f"config.json: {where}target_layer_ids: {ids}: only the outputs of layers 0 to {last - 1} are captured "
                "by every engine"
            )
        return lacks, faults + rotation_faults(config, reader) + tensors(self.tensors(config, own, ids), folder.shapes)


def block_kind(source: Source) -> str | None:
    """Return the kind of the head in a folder; None if it does not draft a block."""
    speculators = source.config.get("speculators_model_type")
    names = [str(name) for name in source.config.get("architectures") or ()]
    if speculators in KINDS:
        return str(speculators)
    name = next((name for name in names if re.search("dflash|dspark", f"{name} {speculators}", re.IGNORECASE)), None)
    if name is not None and (speculators or name not in CLASSES):
        raise UserError(f"{source.path}: config.json: a {name} is not read here; these are: {', '.join(CLASSES)}")
    return None if name is None else CLASSES[name]


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
            "projector_type": own.get("projector_type") not in (None, kind),
            "markov_rank": spark and not own.get("markov_rank"),
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
    if selects:
        lacking = [name for name in SELECTOR_FIELDS if own.get(name) is None]
        if lacking:
            raise UserError(f"{path}: config.json: {lacking[0]}: expected a number, found none")
        config |= {name: own[name] for name in SELECTOR_FIELDS}
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
            weights[name.removeprefix("logit_head.")] = value  # from SpecForge's earliest files
    return weights


def block_misread(source: Source, config: Mapping[str, Any], target: FrozenTarget, *, scaled: bool) -> list[str]:
    """Return a line for each thing that engines read differently from `read_block`. `scaled`: the config has the factor
    of the target's embeddings."""
    raw, said = source.config, []
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
    if "transformer_layer_config" in raw:
        if "causal" in config and full and raw.get("sliding_window_non_causal") is False:
            said.append(f"{VLLM} makes all layers causal where sliding_window_non_causal is false, the full ones too")
        return [*said, f"{SGLANG} does not read speculators' form"]
    if "DSparkDraftModel" in raw["architectures"]:
        said.append(f"{VLLM} takes a DSparkDraftModel for DeepSeek-V4's: Qwen3DSparkModel is its name of this one")
    return said


DFLASH = Format(
    read=partial(read_block, "dflash"),
    engine_config=dflash_engine_config,
    readers={VLLM: vllm("dflash"), SGLANG: sglang("DFLASH", block=True)},
    check=BlockForm("DFlashDraftModel", nested=True).check,
)
DFLASH2 = Format(
    read=partial(read_block, "dflash2"),
    engine_config=dflash2_engine_config,
    readers={VLLM: vllm("dflash"), SGLANG: sglang("DFLASH", block=True)},
    check=BlockForm("DFlash2DraftModel", nested=True, sizes=("block_size", *SELECTOR_FIELDS), selector=True).check,
)
DSPARK = Format(
    read=partial(read_block, "dspark"),
    engine_config=dspark_engine_config,
    readers={VLLM: vllm("dspark"), SGLANG: sglang("DSPARK", block=True)},
    check=BlockForm("Qwen3DSparkModel", nested=False, sizes=("markov_rank", "num_anchors"), markov=True).check,
)
