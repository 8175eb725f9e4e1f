"""Folders of heads that draft a block: config.json as vLLM and SGLang read it, and the tensors under the names that
they load.

All are Qwen3 configs with further fields: at the top level for DSpark, else in `dflash_config`. They number a stream by
the layer that it leaves, which is one less than draftsmith's number. Embeddings and output head are the target's, and
not in the file; SGLang supports no draft vocabulary here.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from heads.blocks.backbone import DraftBlockHead
from heads.blocks.block_config import DraftBlockConfig
from heads.core.engines import LLAMACPP, LOCAL_ENGINES, OPENVINO, SGLANG, VLLM, rotation_errors
from heads.core.serve_commands import llama_cpp, openvino, sglang, vllm
from heads.core.strict_settings import SAVED
from heads.foreign.published_blocks import EMBEDDING_SCALE, SCALED, UNSCALED, embedding_scale, read_block
from heads.formats.engine_folder import TRIED, Folder, Format, any_number, decoder_config
from heads.formats.target_classes import LLAMACPP_TARGETS, OPENVINO_TARGETS, SGLANG_BLOCK_TARGETS, VLLM_TARGETS
from heads.parts.layers import SLIDING

TARGETS = {
    VLLM: VLLM_TARGETS,
    SGLANG: SGLANG_BLOCK_TARGETS,
    LLAMACPP: LLAMACPP_TARGETS,
    OPENVINO: OPENVINO_TARGETS,
}
"""Classes of targets whose residual streams the engine passes to such a head."""
MEASURED_IN_VLLM = (
    f"{TRIED} All layers of those heads had the same norm of keys, because that build norms the keys of the context in "
    "every layer by the first layer's."
)


def block_format(head: type[DraftBlockHead]) -> Format:
    """Return the format of the folders of a method's heads."""
    form = head.Config.form
    readers = {}
    if form.in_vllm:
        readers[VLLM] = vllm(form.algorithm, fixed=form.fixed_depth)
    if form.in_sglang:
        readers[SGLANG] = sglang(form.algorithm.upper(), block=True)
    if form.in_llamacpp:
        readers[LLAMACPP] = llama_cpp(form.algorithm)
    if form.in_openvino:
        readers[OPENVINO] = openvino
    return Format(
        read=partial(read_block, head.Config),
        engine_config=engine_config,
        readers=readers,
        check=partial(check_block, head.Config),
        nearest_steps=whole_block if form.fixed_depth else any_number,
        tried=MEASURED_IN_VLLM if form.title == "DFlash" else None,
    )


def engine_config(config: DraftBlockConfig, target: Mapping[str, object], dtype: str) -> dict[str, object]:
    form, own = config.form, config.engine_fields()
    decoder = {
        "architectures": [form.classes[0]],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        **decoder_config(config, target, dtype),
        "num_hidden_layers": config.num_layers,
        "layer_types": [*config.kinds],
        "use_sliding_window": SLIDING in config.kinds,
        "sliding_window": config.sliding_window,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
    }
    inputs = {"mask_token_id": config.mask_token_id, "target_layer_ids": [k - 1 for k in config.aux_layer_ids]}
    if not config.spare_rows:
        causality = {} if config.sliding_causal else {"is_causal": False}
        return {**decoder, **causality, **inputs, **own}
    nested: dict[str, object] = {**inputs, **(own if form.nested else {})}
    # If only sliding layers are causal within a block, engines infer it from the types of layers.
    if not (SLIDING in config.kinds and config.sliding_causal and not config.is_causal):
        decoder["is_causal"] = nested["causal"] = config.is_causal
    scale = embedding_scale(str(target.get("architecture")), config.hidden_size)
    if form.scales_embeddings and scale != 1:
        nested[EMBEDDING_SCALE] = scale
    return {**decoder, "dflash_config": nested, **({} if form.nested else own)}


def whole_block(config: Mapping[str, Any], steps: int) -> int:
    """Return the number of draft tokens that were trained. vLLM's kernel takes the number of rows that it drafts for a
    stride of XPress's mixer, so any other number gives another head."""
    rows: int = config["block_size"]
    return rows - 1


def check_block(method: type[DraftBlockConfig], folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    config = method.from_plain(folder.config["draftsmith"]["config"], SAVED)
    architecture = str(folder.target.get("architecture"))
    unsupported = None
    if architecture not in TARGETS[reader]:
        unsupported = f"hands no residual streams of a {architecture} to a head of this kind"
    elif reader == VLLM and SCALED.match(architecture) and not config.form.scales_embeddings:
        unsupported = UNSCALED
    else:
        limits = {VLLM: config.vllm_limit, SGLANG: config.sglang_limit, LLAMACPP: config.llamacpp_limit}
        unsupported = limits.get(reader)
    errors = rotation_errors(folder.config, reader)
    if reader in LOCAL_ENGINES and SLIDING in config.kinds and config.sliding_causal and not config.is_causal:
        errors.append("config.json: layer_types: sliding layers would see all rows of their block, too")
    if config.draft_vocab_size is not None and not (reader == LLAMACPP and config.form.algorithm == "dspark"):
        errors.append("d2t: no draft vocabulary is read here")
    captured = range(1, config.num_target_layers)
    if any(k not in captured for k in config.aux_layer_ids):
        errors.append(
            f"config.json: target_layer_ids: {[k - 1 for k in config.aux_layer_ids]}: only the outputs of layers 0 to "
            f"{len(captured) - 1} are captured by every engine"
        )
    return unsupported, errors
