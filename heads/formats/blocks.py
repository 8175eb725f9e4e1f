"""Folders of heads that draft a block: config.json as vLLM and SGLang read it, and the tensors under the names that
they load.

All are Qwen3 configs with further fields: at the top level for DSpark, else in `dflash_config`. They number a stream by
the layer that it leaves, which is one less than draftsmith's number. Embeddings and output head are the target's, and
not in the file; SGLang supports no draft vocabulary here.

Letters: D hidden, L auxiliary layers, R rows of a block, r rank of what the tokens before add to the logits, h width of
a lattice, k candidates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from heads.formats.engine_folder import (
    DECODER_SIZES,
    SGLANG,
    TRIED,
    VLLM,
    Folder,
    Format,
    Shapes,
    attention,
    decoder_config,
    fields,
    gated_mlp,
    rotation_errors,
    sglang,
    sizes,
    tensors,
    vllm,
)
from heads.formats.published_blocks import (
    CONVOLUTION_FIELDS,
    EMBEDDING_SCALE,
    LATTICE_FIELDS,
    LATTICE_SIZES,
    SCALED,
    SELECTOR_FIELDS,
    UNSCALED,
    are_layers,
    embedding_scale,
    read_block,
)
from heads.formats.target_classes import SGLANG_BLOCK_TARGETS, VLLM_TARGETS
from heads.methods.layers import SLIDING

TARGETS = {VLLM: VLLM_TARGETS, SGLANG: SGLANG_BLOCK_TARGETS}
"""Classes of targets whose residual streams the engine passes to such a head."""


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


def lilicorr_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    made = dflash_engine_config(config, target, dtype)
    own = {name: getattr(config, name) for name in LATTICE_FIELDS}
    own |= {"block_size": config.block_size, "lilicorr_enabled": True, "projector_type": "lilicorr"}
    own |= {"lilicorr_hidden_size": config.lattice_width}
    own |= {name: getattr(config, name) for name in CONVOLUTION_FIELDS} if config.conv_kernel_size else {}
    return {**made, "architectures": ["LiLiCorrDraftModel"], "dflash_config": {**made["dflash_config"], **own}}


def xpress_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {
        **dflash_engine_config(config, target, dtype),
        "architectures": ["Qwen3XPressModel"],
        "sample_from_anchor": False,
        "xpress_rank": config.xpress_rank,
        "xpress_mlp_hidden": config.xpress_mlp_hidden,
        "xpress_block_size": config.block_size,
        "xpress_num_passes": config.block_size - 1,  # as many as draft token by token
        "xpress_topc": config.candidates if config.xpress_topc else 0,
    }


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


Fields = Mapping[str, Any]
OwnShapes = Callable[[Fields, Fields], Shapes]
"""(config.json, the method's own fields) -> shapes of the tensors that DFlash does not have."""


def convolutions(c: Fields, own: Fields) -> Shapes:
    D, taps = c["hidden_size"], own["conv_kernel_size"]
    groups, shapes = D // own["conv_group_size"], Shapes()
    for layer in (f"layers.{i}" for i in range(c["num_hidden_layers"])):
        for conv in (f"{layer}.attention_conv", f"{layer}.mlp_conv"):
            shapes[f"{conv}.base_kernel"] = (2, taps, D)
            shapes[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, D)
    return shapes


def selector(c: Fields, own: Fields) -> Shapes:
    form = c["vocab_size"], own["selector_rank"]
    shapes: Shapes = {f"candidate_selector.{name}_codebook": form for name in ("predecessor", "successor")}
    shapes["candidate_selector.hidden_projection.weight"] = (own["selector_rank"], c["hidden_size"])
    return shapes | convolutions(c, own)


def markov(c: Fields, own: Fields) -> Shapes:
    D, r = c["hidden_size"], c["markov_rank"]
    shapes: Shapes = {f"markov_head.markov_w{i}.weight": (c["vocab_size"], r) for i in (1, 2)}
    if c.get("enable_confidence_head"):
        shapes |= {"confidence_head.proj.weight": (1, D + r), "confidence_head.proj.bias": (1,)}
    return shapes


def lattice(c: Fields, own: Fields) -> Shapes:
    D, R = c["hidden_size"], c["block_size"]
    names = ("hidden_size", "candidate_topk", "num_heads", "factor_dim")
    h, k, heads, f = (own[f"lilicorr_{name}"] for name in names)
    inner = int(h * own["lilicorr_mlp_ratio"])
    linears = {"pass_hidden_proj": (h, D), "context_proj": (h, D), "factor_input_proj": (h, 3 * h)}
    linears |= {} if h == D else {"token_proj": (h, D)}
    linears |= {"feature_mlp.up_proj": (h, 5), "feature_mlp.down_proj": (h, h)}
    linears |= {name: (f, h) for name in ("out_head", "in_head", "anchor_out_head")}
    shapes: Shapes = {"output_norm.weight": (h,), "anchor_norm.weight": (h,)}
    shapes |= {"feature_norm.weight": (5,), "feature_norm.bias": (5,), "same_slot_bias": (heads,)}
    shapes |= {"slot_embedding": (1, 1, R - 1, 1, h), "rank_embedding": (1, 1, 1, k, h)}
    shapes |= {"relative_slot_bias": (heads, 2 * R - 1)}
    for layer in (f"layers.{i}" for i in range(own["lilicorr_num_layers"])):
        shapes |= {f"{layer}.{name}.weight": (h,) for name in ("attn_norm", "mlp_norm")}
        shapes |= {f"{layer}.attn.in_proj_weight": (3 * h, h), f"{layer}.attn.in_proj_bias": (3 * h,)}
        linears |= {f"{layer}.attn.out_proj": (h, h)}
        linears |= {f"{layer}.mlp.up_proj": (inner, h), f"{layer}.mlp.down_proj": (h, inner)}
    for name, form in linears.items():
        shapes |= {f"{name}.weight": form, f"{name}.bias": form[:1]}
    made = {f"lilicorr.{name}": form for name, form in shapes.items()}
    return made | (convolutions(c, own) if own.get("conv_kernel_size") else {})


def refiner(c: Fields, own: Fields) -> Shapes:
    D, R, r, inner = c["hidden_size"], c["block_size"], c["xpress_rank"], c["xpress_mlp_hidden"]
    shapes: Shapes = {f"{name}.weight": (c["vocab_size"], r) for name in ("w1", "w2")}
    shapes |= {"down_h.weight": (r, D), "down_g.weight": (r, D), "in_proj.weight": (r, 3 * r), "mix.L": (r, R, R)}
    shapes |= {f"mlp.{name}_proj.weight": (inner, r) for name in ("gate", "up")} | {"mlp.down_proj.weight": (r, inner)}
    return {f"xpress_head.{name}": form for name, form in shapes.items()}


def serve_xpress(target: str, head: str, steps: int, config: Fields) -> str:
    """Return the command for as many draft tokens as were trained: vLLM's kernel takes the number of rows that it
    drafts for a stride of the mixer, so any other number gives another head."""
    return vllm("dflash")(target, head, config.get("block_size", steps + 1) - 1, config)


def kernels_of_xpress(config: Fields) -> str | None:
    """Return the reason why vLLM's kernels do not take a refiner of these sizes, or None."""
    rank, inner = config["xpress_rank"], config["xpress_mlp_hidden"]
    if rank >= 16 and rank & (rank - 1) == 0 and inner % 64 == 0:
        return None
    return (
        "takes an xpress_rank that is a power of two from 16 on, and an xpress_mlp_hidden in steps of 64, not "
        f"{rank} and {inner}"
    )


@dataclass(frozen=True)
class BlockForm:
    architecture: str
    nested: bool = True
    """True if the method's own fields are in `dflash_config`."""
    sizes: tuple[str, ...] = ()
    """Names of further sizes, among the method's own fields if these are nested."""
    shapes: OwnShapes = lambda c, own: {}
    scales: bool = False
    """True if vLLM multiplies embeddings as the target does."""
    lacks: Callable[[Fields], str | None] = lambda config: None
    """config.json -> the reason why vLLM does not support such a head, or None."""

    def tensors(self, c: Fields, own: Fields, ids: list[int]) -> Shapes:
        """Return the shapes of the tensors of a head with this config.json."""
        D, d = c["hidden_size"], c["head_dim"]
        shapes: Shapes = {"fc.weight": (D, len(ids) * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
        for layer in (f"layers.{i}" for i in range(c["num_hidden_layers"])):
            shapes |= {f"{layer}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
            shapes |= {f"{layer}.self_attn.{name}.weight": (d,) for name in ("q_norm", "k_norm")}
            shapes |= attention(f"{layer}.self_attn", c, D) | gated_mlp(f"{layer}.mlp", D, c["intermediate_size"])
        return shapes | self.shapes(c, own)

    def check(self, folder: Folder, reader: str) -> tuple[str | None, list[str]]:
        config, target = folder.config, folder.target
        name = str(target.get("architecture"))
        lacks = None if name in TARGETS[reader] else f"hands no residual streams of a {name} to a head of this kind"
        if lacks is None and reader == VLLM and SCALED.match(name) and not self.scales:
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
        lacks = self.lacks(config) if lacks is None and reader == VLLM else lacks
        last = target["num_layers"] - 1
        if ids[0] < 0 or ids[-1] >= last:
            faults.append(
                f"config.json: {where}target_layer_ids: {ids}: only the outputs of layers 0 to {last - 1} are captured "
                "by every engine"
            )
        return lacks, faults + rotation_errors(config, reader) + tensors(self.tensors(config, own, ids), folder.shapes)


DFLASH = Format(
    read=partial(read_block, "dflash"),
    engine_config=dflash_engine_config,
    readers={VLLM: vllm("dflash"), SGLANG: sglang("DFLASH", block=True)},
    check=BlockForm("DFlashDraftModel").check,
    tried=f"{TRIED} All layers of those heads had the same norm of keys, because that build norms the keys of the "
    "context in every layer by the first layer's.",
)
DFLASH2 = Format(
    read=partial(read_block, "dflash2"),
    engine_config=dflash2_engine_config,
    readers={VLLM: vllm("dflash"), SGLANG: sglang("DFLASH", block=True)},
    check=BlockForm("DFlash2DraftModel", sizes=("block_size", *SELECTOR_FIELDS), shapes=selector, scales=True).check,
)
DSPARK = Format(
    read=partial(read_block, "dspark"),
    engine_config=dspark_engine_config,
    readers={VLLM: vllm("dspark"), SGLANG: sglang("DSPARK", block=True)},
    check=BlockForm("Qwen3DSparkModel", nested=False, sizes=("markov_rank", "num_anchors"), shapes=markov).check,
)
LILICORR = Format(
    read=partial(read_block, "lilicorr"),
    engine_config=lilicorr_engine_config,
    readers={VLLM: vllm("dflash"), SGLANG: sglang("DFLASH", block=True)},
    check=BlockForm("LiLiCorrDraftModel", sizes=("block_size", *LATTICE_SIZES), shapes=lattice).check,
)
XPRESS = Format(
    read=partial(read_block, "xpress"),
    engine_config=xpress_engine_config,
    readers={VLLM: serve_xpress},
    check=BlockForm("Qwen3XPressModel", shapes=refiner, lacks=kernels_of_xpress).check,
)
