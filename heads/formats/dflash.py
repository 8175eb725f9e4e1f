"""Folders of heads that draft a block: config.json as vLLM and SGLang read it, and the tensors under the names that
they load.

All are Qwen3 configs with further fields: in `dflash_config` for DFlash and DFlash2, at the top level for DSpark. They
number a stream by the layer that it leaves, which is one less than draftsmith's number. Embeddings and output head are
the target's, and not in the file; SGLang supports no draft vocabulary here. `heads.formats.dflash_reading` reads the
folders of other projects.

Letters: D hidden, V vocabulary, L auxiliary layers, r rank of what the token before adds to the logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from heads.formats.base import (
    DECODER_SIZES,
    SGLANG,
    VLLM,
    Folder,
    Format,
    Shapes,
    attention,
    decoder_config,
    fields,
    gated_mlp,
    sglang,
    sizes,
    tensors,
    vllm,
)
from heads.formats.dflash_reading import (
    DFLASH2_KIND,
    DFLASH_KIND,
    DSPARK_KIND,
    EMBEDDING_SCALE,
    SCALED,
    SELECTOR_FIELDS,
    UNSCALED,
    embedding_scale,
    is_scaled,
    read_block,
)
from heads.formats.eagle3 import HOOKS_OF_BOTH, HOOKS_OF_VLLM, MULTIMODAL, hooked
from heads.layers import FULL, LAYER_TYPES, SLIDING

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


QWEN3_FIELDS: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def qwen3_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the fields that are Qwen3's."""
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
    """Return the auxiliary layers, each as the number of the layer that the stream leaves."""
    return [k - 1 for k in config.aux_layer_ids]


def dflash_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json under the engines' names, from a `DFlashConfig` and the record of its target."""
    return {
        "architectures": ["DFlashDraftModel"],
        **qwen3_config(config, target, dtype),
        **causality("is_causal", config),
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": left_layer_ids(config),
            **causality("causal", config),
        },
    }


def dflash2_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json under the engines' names, from a `DFlash2Config` and the record of its target."""
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
    """Return config.json under the engines' names, from a `DSparkConfig` and the record of its target."""
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
    """Return the shapes of the tensors that all such heads have."""
    D, d = c["hidden_size"], c["head_dim"]
    shapes: Shapes = {"fc.weight": (D, len(ids) * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"layers.{i}"
        shapes |= {f"{layer}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}.weight": (d,) for name in ("q_norm", "k_norm")}
        shapes |= attention(f"{layer}.self_attn", c, D) | gated_mlp(f"{layer}.mlp", D, c["intermediate_size"])
    return shapes


def selector_tensors(c: Mapping[str, Any], own: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the tensors that DFlash2 has in addition to DFlash's."""
    D, V, r = c["hidden_size"], c["vocab_size"], own["selector_rank"]
    taps, groups = own["conv_kernel_size"], D // own["conv_group_size"]
    shapes: Shapes = {f"candidate_selector.{name}_codebook": (V, r) for name in ("predecessor", "successor")}
    shapes["candidate_selector.hidden_projection.weight"] = (r, D)
    for i in range(c["num_hidden_layers"]):
        for conv in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
            shapes[f"{conv}.base_kernel"] = (2, taps, D)
            shapes[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, D)
    return shapes


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
        shapes = block_tensors(c, ids)
        if self.selector:
            shapes |= selector_tensors(c, own)
        if self.markov:
            shapes |= {f"markov_head.markov_w{i}.weight": (c["vocab_size"], c["markov_rank"]) for i in (1, 2)}
            if c.get("enable_confidence_head"):
                width = c["hidden_size"] + c["markov_rank"]
                shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        return shapes

    def check(self, folder: Folder, reader: str) -> tuple[str | None, list[str]]:
        """Check a folder against one reader."""
        config, target = folder.config, folder.target
        name = str(target.get("architecture"))
        lacks = None if name in TARGETS[reader] else f"hands no residual streams of a {name} to a head of this kind"
        if lacks is None and reader == VLLM and SCALED.match(name) and not self.selector:
            lacks = UNSCALED
        faults = fields(config, {"architectures": [self.architecture]} | QWEN3_FIELDS)
        faults += sizes(config, SIZES)
        own = config.get("dflash_config") if self.nested else config
        where = "dflash_config." if self.nested else ""
        if not isinstance(own, Mapping):
            return lacks, [*faults, f"config.json: dflash_config: expected an object, found {own!r}"]
        faults += sizes(own, self.sizes, where)
        if faults:
            return lacks, faults
        if self.selector and reader == VLLM and not is_scaled(own, name, config["hidden_size"]):
            faults.append(
                f"config.json: dflash_config.{EMBEDDING_SCALE}: expected "
                f"{embedding_scale(name, config['hidden_size']):.6g}, the factor of the target's embeddings, found "
                f"{own.get(EMBEDDING_SCALE)!r}"
            )
        faults += fields(config, {name: target[name] for name in ("hidden_size", "vocab_size")})
        faults += fields(config, {"num_target_layers": target["num_layers"]})
        types: Any = config.get("layer_types")
        known = isinstance(types, list) and all(kind in LAYER_TYPES for kind in types)
        if not known or len(types) != config["num_hidden_layers"]:
            faults.append(f"config.json: layer_types: expected {FULL} or {SLIDING} for each layer, found {types!r}")
            return lacks, faults
        if SLIDING in types:
            faults += fields(config, {"use_sliding_window": True}) + sizes(config, ["sliding_window"])
            if reader == SGLANG and own.get("causal") is False is not config.get("is_causal"):
                faults.append(
                    "config.json: is_causal: expected false, as dflash_config.causal: sliding layers would be causal"
                )
        if self.markov:
            faults += fields(config, {"markov_head_type": "vanilla"})
            if config.get("sample_from_anchor", True) is not True:
                faults.append("config.json: sample_from_anchor: expected true: the root's row would not be read")
            if bool(config.get("enable_confidence_head")) != bool(config.get("confidence_head_with_markov")):
                faults.append(
                    "config.json: confidence_head_with_markov: the confidence head reads the Markov head's state"
                )
        causal = own.get("causal")
        read = config.get("is_causal", None if reader == SGLANG else causal)  # vLLM falls back to the other field
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
        return lacks, faults + tensors(self.tensors(config, own, ids), folder.shapes)


DFLASH = Format(
    read=partial(read_block, DFLASH_KIND),
    engine_config=dflash_engine_config,
    readers={VLLM: vllm("dflash"), SGLANG: sglang("DFLASH", block=True)},
    check=BlockForm("DFlashDraftModel", nested=True).check,
)
DFLASH2 = Format(
    read=partial(read_block, DFLASH2_KIND),
    engine_config=dflash2_engine_config,
    readers={VLLM: vllm("dflash"), SGLANG: sglang("DFLASH", block=True)},
    check=BlockForm("DFlash2DraftModel", nested=True, sizes=("block_size", *SELECTOR_FIELDS), selector=True).check,
)
DSPARK = Format(
    read=partial(read_block, DSPARK_KIND),
    engine_config=dspark_engine_config,
    readers={VLLM: vllm("dspark"), SGLANG: sglang("DSPARK", block=True)},
    check=BlockForm("Qwen3DSparkModel", nested=False, sizes=("markov_rank", "num_anchors"), markov=True).check,
)
