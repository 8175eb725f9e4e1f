"""The folders of DFlash and DSpark: config.json as vLLM and SGLang read it, and the tensors under the names they load.

Both are Qwen3 configurations with more fields, DFlash's inside `dflash_config`, DSpark's beside the others. Layers are
named by the stream that leaves them, one less than ours; speculators alone names them as we do. Embedding and output
head are the target's, and not in the file; SGLang knows no draft vocabulary here.

Letters: D hidden, V vocabulary, L auxiliary layers, r rank of the Markov head.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from heads.errors import UserError, shown
from heads.formats.base import (
    DECODER_SIZES,
    SGLANG,
    VLLM,
    Command,
    Folder,
    Format,
    Reading,
    Shapes,
    attention,
    check_same,
    decoder_config,
    fields,
    gated_mlp,
    sizes,
    tensors,
    vllm,
)
from heads.formats.decoder import check_streams, decoder_settings, is_same_table, refuse_settings
from heads.formats.eagle3 import HOOKS_OF_BOTH, HOOKS_OF_VLLM, hooked, sort_vocab
from heads.formats.source import Source
from heads.layers import FULL, LAYER_TYPES, SLIDING
from heads.target.aux_layers import spread_layer_ids
from heads.target.frozen import FrozenTarget

HOOKS_OF_SGLANG = """
DeepseekV2 DeepseekV3 Gemma4 Glm4MoeLite GptOss Laguna Lfm2 Lfm2Moe Llama MiMoV2 MiMoV2Flash Mistral NemotronH Phi3
Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe
"""
TARGETS = {VLLM: hooked(VLLM, HOOKS_OF_BOTH, HOOKS_OF_VLLM), SGLANG: hooked("", HOOKS_OF_SGLANG)}
"""Classes of targets that hand their residual streams to such a head."""
SCALED = re.compile(r"Gemma\d")
"""Beginnings of targets' classes whose embeddings are multiplied as they are looked up."""
UNSCALED = "reads the embeddings of a Gemma without their factor: another head would run"


QWEN3_FIELDS: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def qwen3_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The fields that are Qwen3's."""
    return {
        **QWEN3_FIELDS,
        **decoder_config(config, target, dtype),
        "num_hidden_layers": config.num_layers,
        "layer_types": [*config.kinds],
        "use_sliding_window": SLIDING in config.kinds,
        "sliding_window": config.sliding_window,
        "rope_scaling": config.rope_scaling,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
    }


def left_layer_ids(config: Any) -> list[int]:
    """The auxiliary layers by the number of the layer that a stream leaves."""
    return [k - 1 for k in config.aux_layer_ids]


def dflash_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A `DFlashConfig` and the record of its target, under the names that engines use."""
    return {
        "architectures": ["DFlashDraftModel"],
        **qwen3_config(config, target, dtype),
        **by_default({"is_causal": config.causal}, config),
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": left_layer_ids(config),
            **by_default({"causal": config.causal}, config),
        },
    }


def by_default(causality: dict[str, bool], config: Any) -> dict[str, bool]:
    """The fields that say what all layers do, or none where each does what engines expect of its type: rows of sliding
    layers see none behind them, those of the others do."""
    return {} if SLIDING in config.kinds and config.sliding_causal and not any(causality.values()) else causality


def dspark_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A `DSparkConfig` and the record of its target, under the names that engines use."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        **qwen3_config(config, target, dtype),
        **({} if config.sliding_causal else {"is_causal": False}),
        "target_layer_ids": left_layer_ids(config),
        "mask_token_id": config.mask_token_id,
        "num_anchors": config.num_anchors,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence_weight > 0,
        "confidence_head_with_markov": config.confidence_weight > 0,
        "sample_from_anchor": True,
    }


SIZES = (*DECODER_SIZES, "num_hidden_layers", "block_size", "num_target_layers")


def block_tensors(c: Mapping[str, Any], ids: list[int]) -> Shapes:
    """The tensors that both have."""
    D, d = c["hidden_size"], c["head_dim"]
    shapes: Shapes = {"fc.weight": (D, len(ids) * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"layers.{i}"
        shapes |= {f"{layer}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}.weight": (d,) for name in ("q_norm", "k_norm")}
        shapes |= attention(f"{layer}.self_attn", c, D) | gated_mlp(f"{layer}.mlp", D, c["intermediate_size"])
    return shapes


@dataclass(frozen=True)
class BlockForm:
    """One of the two folders."""

    architecture: str
    nested: bool
    """True if the fields of its own stand in `dflash_config`."""
    sizes: tuple[str, ...] = ()
    """Further sizes."""
    markov: bool = False

    def tensors(self, c: Mapping[str, Any], ids: list[int]) -> Shapes:
        """The tensors of a head with this config.json."""
        shapes = block_tensors(c, ids)
        if self.markov:
            shapes |= {f"markov_head.markov_w{i}.weight": (c["vocab_size"], c["markov_rank"]) for i in (1, 2)}
            if c.get("enable_confidence_head"):
                width = c["hidden_size"] + c["markov_rank"]
                shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        return shapes

    def check(self, folder: Folder, reader: str) -> tuple[str | None, list[str]]:
        """A folder against one reader."""
        config, target = folder.config, folder.target
        name = str(target.get("architecture"))
        lacks = None if name in TARGETS[reader] else f"hands no residual streams of a {name} to a head of this kind"
        if lacks is None and reader == VLLM and SCALED.match(name):
            lacks = UNSCALED
        faults = fields(config, {"architectures": [self.architecture]} | QWEN3_FIELDS)
        faults += sizes(config, SIZES + self.sizes)
        own = config.get("dflash_config") if self.nested else config
        where = "dflash_config." if self.nested else ""
        if not isinstance(own, Mapping):
            return lacks, [*faults, f"config.json: dflash_config: expected an object, found {own!r}"]
        if faults:
            return lacks, faults
        faults += fields(config, {name: target[name] for name in ("hidden_size", "vocab_size")})
        faults += fields(config, {"num_target_layers": target["num_layers"]})
        types = config.get("layer_types")
        if not isinstance(types, list) or len(types) != config["num_hidden_layers"] or not set(types) <= {*LAYER_TYPES}:
            faults.append(f"config.json: layer_types: expected {FULL} or {SLIDING} for each layer, found {types!r}")
            return lacks, faults
        if SLIDING in types:
            faults += fields(config, {"use_sliding_window": True}) + sizes(config, ["sliding_window"])
            if reader == SGLANG and False in (config.get("is_causal"), own.get("causal")):
                faults.append("config.json: is_causal: rows of sliding layers would see none of the rows behind them")
        if self.markov:
            faults += fields(config, {"markov_head_type": "vanilla"})
            if config.get("sample_from_anchor", True) is not True:
                faults.append("config.json: sample_from_anchor: expected true: the root's row would not be read")
            if bool(config.get("enable_confidence_head")) != bool(config.get("confidence_head_with_markov")):
                faults.append(
                    "config.json: confidence_head_with_markov: the confidence head reads the Markov head's state"
                )
        causal = own.get("causal")
        read = config.get("is_causal", None if reader == SGLANG else causal)  # vLLM falls back on the other
        if bool(read) is not bool(causal):
            faults.append(f"config.json: is_causal: expected {bool(causal)}, found {read!r}: another head would run")
        mask, ids = own.get("mask_token_id"), own.get("target_layer_ids")
        if type(mask) is not int or not 0 <= mask < config["vocab_size"]:
            faults.append(f"config.json: {where}mask_token_id: expected an id of the embedding, found {mask!r}")
        if not isinstance(ids, list) or not all(type(k) is int for k in ids) or sorted(set(ids)) != ids or not ids:
            faults.append(f"config.json: {where}target_layer_ids: expected ascending numbers of layers, found {ids!r}")
            return lacks, faults
        last = target["num_layers"] - 1
        if ids[0] < 0 or ids[-1] >= last:
            faults.append(
                f"config.json: {where}target_layer_ids: {ids}: only the outputs of layers 0 to {last - 1} are captured "
                "by every engine"
            )
        return lacks, faults + tensors(self.tensors(config, ids), folder.shapes)


def sglang_block(algorithm: str) -> Command:
    """Return the command of SGLang, which asks for the tokens of a whole block."""

    def run(target: str, head: str, steps: int) -> str:
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
            f"--speculative-draft-model-path {shlex.quote(head)} --speculative-num-draft-tokens {steps + 1}"
        )

    return run


DFLASH_KIND, DSPARK_KIND = "dflash", "dspark"
CLASSES = {
    "DFlashDraftModel": DFLASH_KIND,
    "DFlashSpeculator": DFLASH_KIND,
    "Qwen3DSparkModel": DSPARK_KIND,
    "DSparkDraftModel": DSPARK_KIND,
    "DSparkSpeculator": DSPARK_KIND,
}
"""Classes that config.json names, of z-lab's, DeepSpec's, SpecForge's and speculators' forms."""
OWN_FIELDS = {
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "causal", "sample_from_anchor"),
    *("projector_type", "attention_mode", "markov_rank", "markov_head_type", "num_anchors"),
    *("use_swa", "swa_window_size", "enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"),
}
"""Fields of `dflash_config` that are read, or change nothing. Any other may be another head's."""
UNUSED = re.compile(r"verifier_(norm|lm_head)\.weight|(.*\.)?rotary_emb\.inv_freq")
"""Tensors of the target, and of no meaning, that files hold."""


def block_kind(source: Source) -> str | None:
    """The kind of the head that a folder holds; None for none that drafts a block."""
    speculators = source.config.get("speculators_model_type")
    names = [str(name) for name in source.config.get("architectures") or ()]
    if speculators in (DFLASH_KIND, DSPARK_KIND):
        return str(speculators)
    name = next((name for name in names if re.search("dflash|dspark", f"{name} {speculators}", re.IGNORECASE)), None)
    if name is not None and (speculators or name not in CLASSES):
        raise UserError(f"{source.path}: config.json: a {name} is not read here; these are: {', '.join(CLASSES)}")
    return None if name is None else CLASSES[name]


def read_block(kind: str, source: Source, target: FrozenTarget) -> Reading | None:
    """A head that drafts a block. Every field may stand in `dflash_config` or beside the others."""
    if block_kind(source) != kind:
        return None
    raw, path = source.config, source.path
    nested: Mapping[str, Any] = raw.get("dflash_config") or {}
    own = {**raw, **nested}
    layer = raw.get("transformer_layer_config")
    qwen, block = decoder_settings(source, raw if layer is None else layer, "qwen3", target)
    width = own.get("target_hidden_size") or qwen.hidden_size
    check_same(source, target, width=width, vocabulary=qwen.vocab_size, number_of_layers=own.get("num_target_layers"))
    spark = kind == DSPARK_KIND
    causal = own.get("causal") if own.get("is_causal") is None else own["is_causal"]
    refuse_settings(
        source,
        {
            "attention_bias": getattr(qwen, "attention_bias", False),
            "target_hidden_size": width != qwen.hidden_size,
            "is_neox_style": own.get("is_neox_style") is False,
            "use_gemma_norm": own.get("use_gemma_norm"),
            "causal": spark and causal,
            # speculators' first DSpark heads knew no such field, and did not.
            "sample_from_anchor": bool(own.get("sample_from_anchor", spark and layer is None)) is not spark,
            "projector_type": own.get("projector_type") not in (None, kind),
            "markov_rank": spark and not own.get("markov_rank"),
            "markov_head_type": spark and own.get("markov_head_type", "vanilla") != "vanilla",
            **{f"dflash_config.{name}": value for name, value in nested.items() if name not in OWN_FIELDS},
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
        config |= {"markov_rank": rank, "confidence_weight": float(own.get("enable_confidence_head", name in weights))}
        if name in weights and weights[name].shape == (1, qwen.hidden_size):  # it does not look at the token before
            weights[name] = pad(weights[name], (0, rank))
    else:
        config["causal"] = bool(causal)
    form = ("" if layer is None else "speculators' ") + ("DSpark" if spark else "DFlash")
    return Reading(form, config, weights, tuple(block_misread(source, config, target)))


def sliding_layers(source: Source, own: Mapping[str, Any], qwen: Any, causal: bool | None) -> dict[str, Any]:
    """The settings of sliding layers; none if no layer slides. `causal`: what the config says of all layers, or None.
    As vLLM reads it, `use_swa` alone makes all of them slide."""
    types = list(getattr(qwen, "layer_types", None) or [FULL] * qwen.num_hidden_layers)
    if len(types) != qwen.num_hidden_layers or not set(types) <= {*LAYER_TYPES}:
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
    """The residual streams that a head reads, by the layer that each enters."""
    name, offset = "target_layer_ids", 1
    if "transformer_layer_config" in own:
        name, offset = "aux_hidden_state_layer_ids", 0
    elif own.get(name) is None:
        return spread_layer_ids(target.num_layers, num_layers)
    ids = own.get(name)
    if not isinstance(ids, list) or not all(type(k) is int for k in ids) or sorted(set(ids)) != ids or not ids:
        raise UserError(f"{source.path}: config.json: {name}: expected ascending numbers of layers, found {shown(ids)}")
    entered = tuple(k + offset for k in ids)
    check_streams(source, entered, target)
    return entered


def block_weights(source: Source, target: FrozenTarget, drafted: int) -> dict[str, Tensor]:
    """A head's own tensors, under their names, with the tables of a vocabulary of `drafted` tokens. UserError for
    embeddings or an output head that are not the target's."""
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
            weights[name.removeprefix("logit_head.")] = value  # SpecForge's earliest had it
    return weights


def block_misread(source: Source, config: Mapping[str, Any], target: FrozenTarget) -> list[str]:
    """Return a line for each thing that engines read otherwise than `read_block`."""
    raw, said = source.config, []
    if SCALED.match(type(target.model).__name__):
        said.append(f"{VLLM} {UNSCALED}")
    if config["num_target_layers"] in config["aux_layer_ids"]:
        said.append(f"{SGLANG} never captures the output of the last layer")
    if 0 in config["aux_layer_ids"]:
        said.append(f"{SGLANG} refuses the embeddings, layer -1, among target_layer_ids")
    if config.get("causal") and not raw.get("is_causal"):
        said.append(f"{SGLANG} reads no causal but is_causal beside the other fields: another head would run")
    full = FULL in config.get("layer_types", [FULL])
    if not config.get("sliding_causal", True):
        said.append(f"{SGLANG} lets no row of a sliding layer see the rows behind it: another head would run")
    if "transformer_layer_config" in raw:
        if "causal" in config and full and raw.get("sliding_window_non_causal") is False:
            said.append(f"{VLLM} makes all layers causal where sliding_window_non_causal is false, the full ones too")
        return [*said, f"{SGLANG} does not read speculators' form"]
    if "DSparkDraftModel" in raw["architectures"]:
        said.append(f"{VLLM} takes a DSparkDraftModel for DeepSeek-V4's: Qwen3DSparkModel is its name of this one")
    return said


DFLASH = Format(
    read=partial(read_block, DFLASH_KIND),
    engine_config=dflash_engine_config,
    readers={VLLM: vllm("dflash"), SGLANG: sglang_block("DFLASH")},
    check=BlockForm("DFlashDraftModel", nested=True).check,
)
DSPARK = Format(
    read=partial(read_block, DSPARK_KIND),
    engine_config=dspark_engine_config,
    readers={VLLM: vllm("dspark"), SGLANG: sglang_block("DSPARK")},
    check=BlockForm("Qwen3DSparkModel", nested=False, sizes=("markov_rank", "num_anchors"), markov=True).check,
)
