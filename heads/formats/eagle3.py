"""Folder of an EAGLE-3 head: config.json as vLLM and SGLang read it, and the tensors under the names that they load.

Layer ids are written in both conventions: vLLM numbers a stream by the layer that it enters, SGLang by the layer that
it leaves. The EAGLE repository reads the file too, but it ignores the layer ids (it only supports the default ones),
`fc_norm` and `norm_output`. speculators' converter (c05b95b) keeps the options and drops the layer ids, unless they are
given by hand.

Letters: D hidden, V vocabulary, Vd draft vocabulary, L auxiliary layers.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.core.errors import UserError, shown
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
    window_option,
)
from heads.formats.source import Source, check_same, check_streams, decoder_settings, is_same_table, refuse_settings
from heads.methods.head_shape import low_middle_high
from heads.targets.model import FrozenTarget

EAGLE = "the EAGLE repository (cb7e084)"
EMBEDDING = "embed_tokens.weight"
IDS = "eagle_aux_hidden_state_layer_ids"

EAGLE3_FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,  # the engines normalise the inputs of further layers differently
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

SLIDING = {"layer_types": ["sliding_attention"]}
"""Fields that make the layer use the config's sliding window."""


def eagle3_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json under the engines' names, from an `Eagle3Config` and the record of its target."""
    # SGLang numbers a stream by the layer that it leaves; -1 = the embeddings.
    outputs = [k - 1 for k in config.aux_layer_ids]
    return {
        **EAGLE3_FIELDS,
        **decoder_config(config, target, dtype),
        **({} if config.sliding_window is None else {"sliding_window": config.sliding_window, **SLIDING}),
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
    fewest: int = 1
    """Minimum number of layers that the reader fuses."""
    options: frozenset[str] = frozenset()
    """Settings of a head that the reader supports. It ignores the others."""


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
        options=EAGLE_3_1 | {"norm_before_residual", "sliding_window"},
    ),
    SGLANG: Eagle3Loader(
        targets=hooked(HOOKS_OF_BOTH, HOOKS_OF_SGLANG, multimodal=MULTIMODAL[SGLANG]),
        ids=("eagle_config", IDS),
        offset=-1,
        fewest=2,  # it omits `fc` where input and output are equally wide
        options=EAGLE_3_1 | {"sliding_window"},  # by an option of its command
    ),
    EAGLE: Eagle3Loader(targets=hooked("Llama Qwen3")),
}
EAGLE3_SIZES = (*DECODER_SIZES, "draft_vocab_size", "num_aux_hidden_states")


def eagle3_tensors(c: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the tensors of a head with this config.json. All other tensors are the target's."""
    D, V, Vd, L = c["hidden_size"], c["vocab_size"], c["draft_vocab_size"], c["num_aux_hidden_states"]
    shapes: Shapes = {
        "fc.weight": (D, L * D),
        **{f"midlayer.{name}.weight": (D,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **attention("midlayer.self_attn", c, 2 * D),
        **gated_mlp("midlayer.mlp", D, c["intermediate_size"]),
        "norm.weight": (D,),
        "lm_head.weight": (Vd, D),
    }
    if c.get("norm_before_fc"):
        shapes |= {"input_norm.weight": (L * D,)}
    if c.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (D,) for i in range(L)}
    if c.get("own_embeddings"):
        shapes |= {EMBEDDING: (V, D)}
    if Vd != V:  # vLLM refuses tables for a whole vocabulary
        shapes |= {"d2t": (Vd,), "t2d": (V,)}
    return shapes


def check_eagle3(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    config, target, loader = folder.config, folder.target, EAGLE3[reader]
    name = str(target.get("architecture"))
    lacks = None if name in loader.targets else f"hands no residual streams of a {name} to a head"
    faults = fields(config, EAGLE3_FIELDS) + sizes(config, EAGLE3_SIZES)
    faults += fields(config, {name: target[name] for name in ("hidden_size", "vocab_size")})
    if faults:
        return lacks, faults
    faults = tensors(eagle3_tensors(config), folder.shapes)
    options = (*sorted(EAGLE_3_1), "norm_before_residual", "sliding_window")
    ignored = [name for name in options if config.get(name) and name not in loader.options]
    faults += [f"config.json: {name}: is not read, so another head would run" for name in ignored]
    faults += rotation_faults(config, reader)
    if reader == SGLANG and EMBEDDING in folder.shapes:
        faults.append(f"{EMBEDDING}: the target's own would take its place")
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
    if len(ours) < loader.fewest:
        faults.append(f"fc is left out where {len(ours)} layer is read: take {loader.fewest} or more")
    return faults


def speculators(head: str, target: str, config: Mapping[str, Any]) -> list[str]:
    """Return a line with the command that converts a saved head into speculators' form."""
    ids = json.dumps({"eagle_aux_hidden_state_layer_ids": list(config["aux_layer_ids"])})
    run = (
        f"speculators convert {shlex.quote(head)} --algorithm eagle3 --verifier {shlex.quote(target)} "
        f"--algorithm-kwargs {shlex.quote(ids)}"
    )
    return [f"speculators' converter drops the layer ids unless they are given: `{run}`"]


DROPPED = ("verifier_norm.weight", "verifier_lm_head.weight", "midlayer.self_attn.rotary_emb.inv_freq")
"""Tensors in files that are the target's or have no effect."""


def read_eagle3(source: Source, target: FrozenTarget) -> Reading | None:
    """Read a head of one decoder layer, raw or in speculators' form. Every config field that may be absent in Llama's
    config may be absent here."""
    raw, path = source.config, source.path
    layer, kind = raw.get("transformer_layer_config"), raw.get("speculators_model_type")
    named = any("eagle3" in str(name).lower() for name in raw.get("architectures") or ())
    if kind not in (None, "eagle3") or not (named or kind or "draft_vocab_size" in raw):
        return None
    decoder = raw if layer is None else layer
    llama, block = decoder_settings(source, decoder, "llama", target)
    V, Vd = llama.vocab_size, raw.get("draft_vocab_size") or llama.vocab_size
    check_same(source, target, width=raw.get("target_hidden_size") or llama.hidden_size, vocabulary=V)
    said = raw.get("eagle_config")
    nested: dict[str, Any] = said if isinstance(said, dict) else {}
    unread = {
        "eagle_config.use_aux_hidden_state": nested.get("use_aux_hidden_state") is False,
        "target_hidden_size": llama.hidden_size != target.hidden_size,
    }
    refuse_settings(source, unread)
    if "fc.weight" not in source.files:
        raise UserError(f"{path}: tensor fc.weight: expected the fusion of the target's layers, found none")
    weights = source.read()
    weights = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in weights.items()}
    if further := sorted(name for name in weights if name.startswith("layers.")):
        raise UserError(f"{path}: {further[0]}: a head of several layers, and heads of one alone are read here")
    for name in DROPPED:
        weights.pop(name, None)
    embed: Any = target.shared.embed_tokens
    if EMBEDDING in weights and is_same_table(weights[EMBEDDING], embed.weight):
        del weights[EMBEDDING]
    sort_vocab(path, weights, V, Vd)
    config = {
        **block,
        "draft_vocab_size": Vd,
        "own_embeddings": EMBEDDING in weights,
        **{name: bool(raw.get(name)) for name in ("fc_norm", "norm_output", "norm_before_residual")},
        "norm_before_fc": bool(raw.get("norm_before_fc") or nested.get("norm_before_fc")),  # NVIDIA's is nested
        "sliding_window": decoder.get("sliding_window")
        if decoder.get("layer_types") == SLIDING["layer_types"]
        else None,
        "aux_layer_ids": captured(source, nested, target, weights["fc.weight"].shape[-1]),
    }
    form = "raw EAGLE-3" if layer is None else "speculators' EAGLE-3"
    differs = misread(raw, nested, config)
    if Vd == V and "d2t" in source.files:
        differs.append(f"{VLLM} refuses a file with the d2t of a whole vocabulary")
    return Reading(form, config, weights, tuple(differs))


def sort_vocab(path: str, weights: dict[str, Tensor], V: int, Vd: int) -> None:
    """Convert the tables of a draft vocabulary to the form of `heads.methods.vocab`, with draft ids in the order of
    their target ids, and reorder the tensors that have a row per draft id. Afterwards both tables are present, or
    neither."""
    d2t = weights.get("d2t")
    if d2t is None or d2t.shape != (Vd,) or d2t.is_floating_point():
        return  # reported when the tables are read
    kept, order = (d2t.long() + torch.arange(Vd)).sort()
    if kept[0] < 0 or kept[-1] >= V or not (kept.diff() > 0).all():
        raise UserError(f"{path}: d2t: expected target ids below {V}, each once, as offsets from the draft ids")
    marks = torch.zeros(V, dtype=torch.bool)
    marks[kept] = True
    if "t2d" in weights and not torch.equal(weights["t2d"].bool(), marks):
        raise UserError(f"{path}: t2d marks other target ids than d2t names")
    weights |= {"d2t": kept - torch.arange(Vd), "t2d": marks}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if len(weights.get(name, ())) == Vd:
            weights[name] = weights[name][order]
    if Vd == V:
        del weights["d2t"], weights["t2d"]


def captured(source: Source, nested: Mapping[str, Any], target: FrozenTarget, width: int) -> tuple[int, ...]:
    """Return the residual streams that the trainer meant: those in config.json, numbered by the layers that they enter,
    else those in `nested`, numbered by the layers that they leave, else the default ones."""
    path, ids = source.path, source.config.get(IDS)
    if ids is None and nested.get(IDS) is not None:
        ids = [k + 1 if type(k) is int else k for k in nested[IDS]] if isinstance(nested[IDS], list) else nested[IDS]
    ids = low_middle_high(target.num_layers) if ids is None else ids
    if not isinstance(ids, list | tuple) or not all(type(k) is int for k in ids) or len(set(ids)) != len(ids):
        raise UserError(f"{path}: config.json: {IDS}: expected numbers of layers, each once, found {shown(ids)}")
    check_streams(source, ids, target)
    if width != len(ids) * target.hidden_size:
        raise UserError(
            f"{path}: tensor fc.weight: expected {len(ids) * target.hidden_size} columns for the layers {list(ids)}, "
            f"found {width}"
        )
    return tuple(sorted(ids))


def misread(raw: Mapping[str, Any], nested: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return a line for each thing that engines read differently from `read_eagle3`."""
    ids, layers = list(config["aux_layer_ids"]), config["num_target_layers"]
    outputs, default = [k - 1 for k in ids], list(low_middle_high(layers))
    named, said = (raw.get(IDS), nested.get(IDS)), []
    if named[0] is None and named[1] is not None and ids != default:
        said.append(f"{VLLM} ignores the layer ids in eagle_config and captures {default} in the place of {ids}")
    if None not in named and sorted(nested[IDS]) != outputs:
        said.append(f"{SGLANG} reads the layer ids in eagle_config, {named[1]}: other layers than {IDS} names")
    if named[0] is not None and named[1] is None and "transformer_layer_config" not in raw and ids != default:
        said.append(
            f"{SGLANG} reads no layer ids but those in eagle_config and captures {default} in the place of {ids}"
        )
    if any(sorted(found) != found for found in named if isinstance(found, list)):
        said.append(f"the layer ids are not ascending: engines capture {ids}, in this order")
    if layers in ids:
        said.append(f"{SGLANG} never captures the output of the last layer")
    if config["norm_before_residual"]:
        said.append(f"{SGLANG} does not read norm_before_residual: another head would run")
    if config["sliding_window"]:
        said.append(f"{SGLANG} does not read sliding_window: serve it with {window_option(config['sliding_window'])}")
    if config["own_embeddings"]:
        said.append(f"{SGLANG} puts the target's embeddings in the place of the head's own")
    if "transformer_layer_config" in raw:
        return [*said, f"{SGLANG} does not read speculators' form"]
    if raw.get("num_hidden_layers", 1) != 1:
        said.append(f"{VLLM} makes {raw['num_hidden_layers']} layers by num_hidden_layers, and the file has one")
    if "LlamaForCausalLMEagle3" not in (raw.get("architectures") or []):
        said.append(f"{SGLANG} loads no head whose architectures are not LlamaForCausalLMEagle3")
    return said


FORMAT = Format(
    read=read_eagle3,
    engine_config=eagle3_engine_config,
    readers={
        VLLM: vllm("eagle3"),
        SGLANG: sglang("EAGLE3"),
        EAGLE: lambda target, head, *_: f"EaModel.from_pretrained(base_model_path={target!r}, ea_model_path={head!r})",
    },
    check=check_eagle3,
    converters=speculators,
)
