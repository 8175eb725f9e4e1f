"""Folder of an EAGLE-3 head: config.json as vLLM and SGLang read it, and the tensors under the names that they load.

Layer ids are written in both conventions: vLLM numbers a stream by the layer that it enters, SGLang by the layer that
it leaves. The EAGLE repository reads the file too, but it ignores the layer ids (it only supports the default ones),
`fc_norm` and `norm_output`. speculators' converter (c05b95b) keeps the options and drops the layer ids, unless they are
given by hand.

Letters: D width of the head, Dt width of the target, V vocabulary, Vd draft vocabulary, L auxiliary layers.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
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
    rotation_faults,
    sglang,
    sizes,
    tensors,
    vllm,
)
from heads.formats.published_eagle3 import EMBEDDING, HEAD, IDS, QWEN3, UNEVEN, read_eagle3
from heads.methods.head_shape import low_middle_high
from heads.methods.layers import SLIDING

EAGLE = "the EAGLE repository (cb7e084)"
EAGLE3_FIELDS: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

LLAMA = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


def eagle3_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json under the engines' names, from an `Eagle3Config` and the record of its target."""
    # SGLang numbers a stream by the layer that it leaves; -1 = the embeddings.
    outputs = [k - 1 for k in config.aux_layer_ids]
    made = {
        **(QWEN3 if config.qk_norm else LLAMA),
        **EAGLE3_FIELDS,
        **decoder_config(config, target, dtype),
        "num_hidden_layers": config.num_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "own_embeddings": config.own_embeddings,  # no engine reads it: the tensors in the file decide
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "num_aux_hidden_states": len(config.aux_layer_ids),
        IDS: list(config.aux_layer_ids),
        "eagle_config": {"use_aux_hidden_state": True, IDS: outputs},
    }
    if config.sliding_window is not None:
        made |= {"sliding_window": config.sliding_window, "layer_types": [SLIDING] * config.num_layers}
    if config.target_hidden_size is not None:
        made |= {"target_hidden_size": config.target_hidden_size}
    return made


@dataclass(frozen=True, kw_only=True)
class Eagle3Loader:
    """Limits of one reader of EAGLE-3 heads."""

    targets: frozenset[str]
    """Classes of targets whose residual streams the reader passes to a head."""
    ids: tuple[str, ...] = ()
    """Path of the layer ids in config.json. Empty: the reader ignores them, and only supports the default layers."""
    offset: int = 0
    """The stream that enters layer k has the number k + offset."""
    last: bool = False
    """True if the reader captures the output of the last layer."""
    fc_by_width: bool = True
    """True if the reader applies `fc` where what it is given is not as wide as the head."""
    options: frozenset[str] = frozenset()
    """Settings of a head that the reader supports. It ignores the others."""
    most_layers: int | None = None
    """Maximum number of decoder layers that the reader runs, None for no limit."""


HOOKS_OF_BOTH = """
Apertus DeepseekV2 DeepseekV3 Gemma4 GptOss InternLM3 Llama Llama4 MiniMaxM2 Ministral3 Mistral MistralLarge3 Phi3 Qwen2
Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe
"""
HOOKS_OF_VLLM = """
Afmoe Cohere2Moe Deepseek Ernie4_5 Granite GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA Laguna MiMo MiMoV2
MiMoV2Flash MiniCPM MiniCPM3 NemotronH Plamo3 Step1
"""
HOOKS_OF_SGLANG = """
BailingMoe BailingMoeV2 DeepseekV32 ExaoneMoe Gemma3 Glm4Moe Glm4MoeLite GlmMoeDsa LongcatFlash Mellum Qwen2Moe
"""
MULTIMODAL = {
    VLLM: "Gemma4 Gemma4Unified Llama4 Llava Mistral3 Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Kimi_K25",
    SGLANG: "Gemma3 Gemma4 Gemma4Unified Llama4 Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Kimi_K25",
}


def hooked(*texts: str, multimodal: str = "") -> frozenset[str]:
    """Return the classes of the families in `texts`, and the multimodal classes of those in `multimodal`. Of the
    classes with the hook, these are only the ones that transformers has."""
    text = {f"{name}ForCausalLM" for names in texts for name in names.split()}
    return frozenset(text | {f"{name}ForConditionalGeneration" for name in multimodal.split()})


EAGLE_3_1 = frozenset({"norm_before_fc", "fc_norm", "norm_output"})
EAGLE3 = {
    VLLM: Eagle3Loader(
        targets=hooked(HOOKS_OF_BOTH, HOOKS_OF_VLLM, multimodal=MULTIMODAL[VLLM]),
        ids=(IDS,),
        last=True,
        fc_by_width=False,
        options=EAGLE_3_1 | {"norm_before_residual", "sliding_window"},
    ),
    SGLANG: Eagle3Loader(
        targets=hooked(HOOKS_OF_BOTH, HOOKS_OF_SGLANG, multimodal=MULTIMODAL[SGLANG]),
        ids=("eagle_config", IDS),
        offset=-1,
        options=EAGLE_3_1 | {"sliding_window"},  # by an option of its command
    ),
    EAGLE: Eagle3Loader(targets=hooked("Llama Qwen3"), most_layers=1),
}
OPTIONS = (*sorted(EAGLE_3_1), "norm_before_residual", "sliding_window")
EAGLE3_SIZES = (*DECODER_SIZES, "num_hidden_layers", "draft_vocab_size", "num_aux_hidden_states")


NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def eagle3_tensors(c: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the tensors of a head with this config.json. All other tensors are the target's."""
    D, V, Vd, L = c["hidden_size"], c["vocab_size"], c["draft_vocab_size"], c["num_aux_hidden_states"]
    Dt = c.get("target_hidden_size") or D
    shapes: Shapes = {"fc.weight": (D, L * Dt), "norm.weight": (D,), HEAD: (Vd, D)}
    for i in range(c["num_hidden_layers"]):
        layer = f"layers.{i}" if i else "midlayer"
        shapes |= {f"{layer}.{name}.weight": (D,) for name in NORMS}
        shapes |= attention(f"{layer}.self_attn", c, D if i else 2 * D)
        shapes |= gated_mlp(f"{layer}.mlp", D, c["intermediate_size"])
        if c["model_type"] == QWEN3["model_type"]:
            shapes |= {f"{layer}.self_attn.{name}.weight": (c["head_dim"],) for name in ("q_norm", "k_norm")}
    if c.get("norm_before_fc"):
        shapes |= {"input_norm.weight": (L * Dt,)}
    if c.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (Dt,) for i in range(L)}
    if c.get("own_embeddings"):
        shapes |= {EMBEDDING: (V, D)}
    if Vd != V:  # vLLM refuses tables for a whole vocabulary
        shapes |= {"d2t": (Vd,), "t2d": (V,)}
    return shapes


def check_eagle3(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    config, target, loader = folder.config, folder.target, EAGLE3[reader]
    name = str(target.get("architecture"))
    is_qwen3 = config.get("model_type") == QWEN3["model_type"]
    lacks = None if name in loader.targets else f"hands no residual streams of a {name} to a head"
    if is_qwen3 and reader != VLLM:
        lacks = "runs no head that norms queries and keys"
    faults = fields(config, EAGLE3_FIELDS | (QWEN3 if is_qwen3 else LLAMA)) + sizes(config, EAGLE3_SIZES)
    width = "target_hidden_size" if "target_hidden_size" in config else "hidden_size"
    faults += fields(config, {width: target["hidden_size"], "vocab_size": target["vocab_size"]})
    if faults:
        return lacks, faults
    faults = tensors(eagle3_tensors(config), folder.shapes)
    ignored = [name for name in OPTIONS if config.get(name) and name not in loader.options]
    faults += [f"config.json: {name}: is not read, so another head would run" for name in ignored]
    faults += rotation_faults(config, reader)
    D, layers = config["hidden_size"], config["num_hidden_layers"]
    if reader == SGLANG and EMBEDDING in folder.shapes and config[width] == D:
        faults.append(f"{EMBEDDING}: the target's own would take its place")
    if reader != EAGLE and not is_qwen3 and D % config["num_attention_heads"]:
        faults.append(f"config.json: hidden_size: {D}: {UNEVEN}")
    if loader.most_layers is not None and layers > loader.most_layers:
        faults.append(f"config.json: num_hidden_layers: {layers}: only the first layer is run")
    if loader.fc_by_width and config["num_aux_hidden_states"] * config[width] == D:
        faults.append(f"fc is left out where it is as wide as the states that it reads, {D}: take more layers")
    return lacks, faults + layer_ids(config, target["num_layers"], reader)


def layer_ids(config: Mapping[str, Any], layers: int, reader: str) -> list[str]:
    """Return the faults of the residual streams that a reader would capture."""
    loader, ours = EAGLE3[reader], config[IDS]  # by the layer that each enters
    read: Any = config
    for key in loader.ids:
        read = read.get(key, {})
    default = list(low_middle_high(layers))
    expected = [k + loader.offset for k in ours]
    faults = []
    if not loader.ids and ours != default:
        faults.append(f"no layer ids are read: {default} would be captured in the place of {ours}")
    if loader.ids and read != expected:
        where = ".".join(loader.ids)
        faults.append(f"config.json: {where}: expected {expected}, found {read!r}: other layers would be captured")
    if not all(0 <= k < layers + loader.last for k in ours):
        faults.append(f"layer {max(ours)} of {layers}, the last one's output, is never captured: take lower ones")
    return faults


def speculators(head: str, target: str, config: Mapping[str, Any]) -> list[str]:
    """Return a line with the command that converts a saved head into speculators' form."""
    ids = json.dumps({"eagle_aux_hidden_state_layer_ids": list(config["aux_layer_ids"])})
    run = (
        f"speculators convert {shlex.quote(head)} --algorithm eagle3 --verifier {shlex.quote(target)} "
        f"--algorithm-kwargs {shlex.quote(ids)}"
    )
    return [f"speculators' converter drops the layer ids unless they are given: `{run}`"]


FORMAT = Format(
    read=read_eagle3,
    engine_config=eagle3_engine_config,
    readers={
        VLLM: vllm("eagle3"),
        SGLANG: sglang("EAGLE3"),
        EAGLE: lambda target, head, *_: f"EaModel.from_pretrained(base_model_path={target!r}, ea_model_path={head!r})",
    },
    check=check_eagle3,
    quantizes=True,
    tried=TRIED,
    converters=speculators,
)
