"""Tensors of multi-token prediction: conversion to and from the names of model families, and reading from a target.

    mimo      model.mtp_layers.{i}.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}, block next to them
    deepseek  model.layers.{n + i}.{enorm, hnorm, eh_proj, shared_head.norm}, block next to them; n: target layers.
              GLM-4.5 and GLM-4.7-Flash use these, too
    qwen      mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, block in mtp.layers.0; one module

A block is a decoder layer of the target's own class (`heads.target.block`). Its experts are in one tensor or in one
each, as in the checkpoint. The model classes of transformers drop these tensors when they load, so they are read from
the target's files.

Engines load the folder of a saved head together with the target. Its config.json is the target's own, and its weights
are only the modules, under the names of the target's family. Embeddings and output head are the target's.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from heads.errors import UserError, first_line
from heads.formats.base import (
    SGLANG,
    VLLM,
    Folder,
    Format,
    Reading,
    Shapes,
    check_same,
    fields,
    named_class,
    sglang,
    tensors,
    vllm,
)
from heads.formats.source import Source
from heads.target.families import register_mimo
from heads.target.family_layers import BlockMaker, block_record
from heads.target.head_shape import block_settings
from heads.target.model import FrozenTarget

PARTS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""The target's own embeddings and output head. DeepSeek's modules store copies of them."""


@dataclass(frozen=True)
class Layout:
    """Names of the tensors of a module in one family."""

    prefix: str
    """Prefix of module i; n is the number of the target's decoder layers."""
    parts: tuple[str, str, str, str]
    """Names of PARTS."""
    block: str
    """Text between the prefix and the names of the decoder block."""
    hidden_first: bool
    """True if the first half of the projection reads the hidden state."""
    zero_first: bool = False
    """True if engines read the token at position 0 as zeros: vLLM in both layouts that set it, SGLang only in
    MiMo's."""

    def of_module(self, i: int, layers: int) -> str:
        return self.prefix.format(i=i, n=layers + i)


LAYOUTS = {
    "mimo": Layout("model.mtp_layers.{i}.", PARTS, "", hidden_first=True, zero_first=True),
    "deepseek": Layout(
        "model.layers.{n}.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "",
        hidden_first=False,
        zero_first=True,
    ),
    "qwen": Layout(
        "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0.", hidden_first=False
    ),
}


def field_name(own: str, layout: Layout, layers: int) -> str:
    """Return the family's name of `mtp_layers.I.PART.weight` or `mtp_layers.I.block.NAME`."""
    match = re.fullmatch(r"mtp_layers\.(\d+)\.(\w+)\.(.+)", own)
    assert match, own
    prefix, part, rest = layout.of_module(int(match[1]), layers), match[2], match[3]
    if part == "block":
        return prefix + layout.block + rest.removeprefix("layer.")
    return f"{prefix}{layout.parts[PARTS.index(part)]}.{rest}"


def to_field(own: Mapping[str, Tensor], layout: Layout, layers: int, stored: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a head's tensors under the family's names. The head holds a layer's experts as one tensor. They are split
    into one tensor each, unless the checkpoint, whose names are `stored`, has them as one, too."""
    out = {}
    for name, value in own.items():
        name = field_name(name, layout, layers)
        if name in stored:
            out[name] = value
        elif name.endswith(".experts.gate_up_proj"):
            for e, both in enumerate(value):
                for projection, matrix in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    out[name.replace("gate_up_proj", f"{e}.{projection}.weight")] = matrix
        elif name.endswith(".experts.down_proj"):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): matrix for e, matrix in enumerate(value)}
        else:
            out[name] = value
    return out


def from_field(
    field: Mapping[str, Tensor], own: Mapping[str, Tensor], layout: Layout, layers: int
) -> dict[str, Tensor]:
    """Return the inverse of `to_field`, for a head with the tensors `own`. Names and shapes are known to fit."""
    out = {}
    for name, value in own.items():
        theirs = field_name(name, layout, layers)
        if theirs in field:
            out[name] = field[theirs]
        elif theirs.endswith(".experts.gate_up_proj"):
            base = theirs.removesuffix("gate_up_proj")
            pairs = [
                torch.cat([field[f"{base}{e}.gate_proj.weight"], field[f"{base}{e}.up_proj.weight"]])
                for e in range(len(value))
            ]
            out[name] = torch.stack(pairs)
        else:
            base = theirs.removesuffix("down_proj")
            out[name] = torch.stack([field[f"{base}{e}.down_proj.weight"] for e in range(len(value))])
    return out


@dataclass(frozen=True)
class NativeModules:
    """MTP modules in a target's checkpoint."""

    layout: str
    count: int
    weights: dict[str, Tensor]
    """Tensors under the family's names, without the copies of the target's layers (`SHARED`)."""


def read_native(source: Source, config: Any, shared: Mapping[str, Tensor]) -> NativeModules:
    """Read the MTP modules in a checkpoint of a target with the Hugging Face `config`.

    shared: the target's embeddings and output head. Copies of them in a module must be equal to them. Raises UserError
    if there is no module, if there are fewer than the config says, or if one is quantised.
    """
    path, files = source.path, source.files
    layers: int = config.num_hidden_layers
    name, count = find_modules(files, layers)
    if count == 0:
        looked = ", ".join(f"{layout.of_module(0, layers)}{layout.parts[2]}" for layout in LAYOUTS.values())
        raise UserError(
            f"{path}: holds no module of multi-token prediction (looked for {looked}); "
            "leave head.native out to train one from scratch"
        )
    promised = next(
        (n for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if (n := getattr(config, key, None))), count
    )
    if promised > count:
        raise UserError(
            f"{path}: its config.json promises {promised} modules of multi-token prediction, its files hold {count}; "
            "fetch the whole checkpoint"
        )
    weights = source.read(module_names(files, LAYOUTS[name], count, layers))
    for key in [key for key in weights if key.endswith(SHARED)]:
        _check_shared(path, key, weights.pop(key), shared)
    for key, value in weights.items():
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"{path}: {key} is {value.dtype}; expected a checkpoint whose modules are not quantised")
    return NativeModules(name, count, weights)


def count_modules(layout: Layout, names: Iterable[str], layers: int) -> int:
    """Return the number of modules of this layout among the tensors, counted from the first; at most 1 if all share a
    prefix."""
    held, count = set(names), 0
    while f"{layout.of_module(count, layers)}{layout.parts[2]}.weight" in held:
        count += 1
        if layout.of_module(count, layers) == layout.of_module(0, layers):
            break
    return count


def find_modules(names: Collection[str], layers: int) -> tuple[str, int]:
    """Return the layout and the number of the modules among a checkpoint's tensors. The number is 0 if there are
    none."""
    counts = {name: count_modules(layout, names, layers) for name, layout in LAYOUTS.items()}
    return max(counts.items(), key=lambda found: found[1])


def module_names(names: Iterable[str], layout: Layout, count: int, layers: int) -> list[str]:
    """Return the names of the tensors of the first `count` modules, with their copies of the target's layers
    (`SHARED`)."""
    prefixes = tuple({layout.of_module(i, layers) for i in range(count)})
    return [name for name in names if name.startswith(prefixes)]


def _check_shared(path: str, key: str, value: Tensor, shared: Mapping[str, Tensor]) -> None:
    """Raise UserError for a module with its own embeddings or output head: heads use the target's."""
    ours = shared["embed_tokens.weight" if key.endswith("embed_tokens.weight") else "shared_head.head.weight"]
    if value.shape != ours.shape or not torch.equal(value.to(ours.dtype), ours.cpu()):
        raise UserError(
            f"{path}: {key} is not the target's own; only modules that share the target's embeddings "
            "and output head are read"
        )


def mtp_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json: the target's own, from `heads.checkpoint.target_record`. Engines find the modules' class with
    it.

    The modules are not quantised, even if the target's checkpoint is.
    """
    return {key: value for key, value in target["config"].items() if key != "quantization_config"}


@dataclass(frozen=True)
class MtpLoader:
    """Engines that load the modules of one class of targets."""

    layout: str
    """One of LAYOUTS."""
    count: str
    """Field of the target's config with the number of modules."""
    most: Mapping[str, int | None]
    """Maximum number of modules that each engine loads, None for no limit. Engines that are not listed cannot load
    any."""
    differs: tuple[str, ...] = ()
    """Ways in which an engine computes differently from this head."""


ONE_EACH = {VLLM: 1, SGLANG: 1}
DEEPSEEK = {VLLM: None, SGLANG: 1}
FIRST_TOKEN = f"{SGLANG} reads the token at position 0 too, which this head and {VLLM} read as zeros"
PRE_NORM = f"{VLLM} recycles the state before shared_head.norm from the second draft token on, this head that after it"
QWEN3_5 = MtpLoader("qwen", "mtp_num_hidden_layers", ONE_EACH)
MTP = {
    "DeepseekV3ForCausalLM": MtpLoader("deepseek", "num_nextn_predict_layers", DEEPSEEK, (FIRST_TOKEN,)),
    "Glm4MoeForCausalLM": MtpLoader("deepseek", "num_nextn_predict_layers", DEEPSEEK, (FIRST_TOKEN, PRE_NORM)),
    # vLLM looks for the modules of this family at layer 0, because its config override says that the target has no
    # layers.
    "Glm4MoeLiteForCausalLM": MtpLoader("deepseek", "num_nextn_predict_layers", {SGLANG: 1}, (FIRST_TOKEN,)),
    "MiMoForCausalLM": MtpLoader("mimo", "num_nextn_predict_layers", ONE_EACH),
    "Qwen3NextForCausalLM": MtpLoader("qwen", "num_nextn_predict_layers", ONE_EACH),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5,
}
"""Loader of the modules of each class of targets. The folder's config.json is the target's own, because engines go by
its class. They use the target's embeddings and output head if the folder has none. No engine supports a draft
vocabulary."""


def module_shapes(config: Any, layout: Layout, count: int, stored: Collection[str] = ()) -> Shapes:
    """Return the shapes of the tensors of `count` modules of a target with this config, with `stored` as in `to_field`.
    Their blocks are layers of the target's own class."""
    D = config.hidden_size
    with torch.device("meta"):
        block = BlockMaker(block_record(config, 1)).layers[0].state_dict()
        module = {f"{part}.weight": torch.empty((D, 2 * D) if part == "input_proj" else (D,)) for part in PARTS}
    module |= {f"block.{name}": tensor for name, tensor in block.items()}
    own = {f"mtp_layers.{i}.{name}": tensor for i in range(count) for name, tensor in module.items()}
    field = to_field(own, layout, config.num_hidden_layers, stored)
    return {name: tuple(tensor.shape) for name, tensor in field.items()}


def check_mtp(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    """Check modules of multi-token prediction with their target's own config.json."""
    name = named_class(folder.config)
    loader = None if name is None else MTP.get(name)
    if name is None or loader is None or reader not in loader.most:
        return f"loads no modules of a {name}", []
    layout, most = LAYOUTS[loader.layout], loader.most[reader]
    try:
        register_mimo()
        own = {key: value for key, value in folder.config.items() if key not in ("draftsmith", "auto_map")}
        config: Any = AutoConfig.for_model(**own).get_text_config()
        count = count_modules(layout, folder.shapes, config.num_hidden_layers)
        expected = module_shapes(config, layout, max(count, 1), folder.shapes)
    except Exception as error:  # each family's config refuses in its own way
        return None, [f"config.json: not that of a {name} ({first_line(error)})"]
    promised = getattr(config, loader.count, None)
    text_class = name.replace("ForConditionalGeneration", "ForCausalLM")  # only a multimodal target's text model is run
    faults = fields({"architectures": [text_class]}, {"architectures": [folder.target.get("architecture")]})
    if promised is not None and promised != count:
        faults.append(f"config.json: {loader.count}: {promised}, the file holds {count} modules")
    lacks = None if most is None or count <= most else f"takes at most {most} module, the head has {count}"
    return lacks, faults + tensors(expected, folder.shapes)


def native_config(target: FrozenTarget, native: NativeModules) -> dict[str, Any]:
    """Return the settings that native modules determine, for an `MtpConfig` over the target's whole vocabulary."""
    return {
        **block_settings(target),
        "native": True,
        "draft_vocab_size": target.vocab_size,
        "layout": native.layout,
        "num_modules": native.count,
        "depth": max(3, native.count),
        "decoder": block_record(target.config, native.count),
    }


def shared_layers(target: FrozenTarget) -> dict[str, Tensor]:
    """Return the layers of the target that modules may store copies of."""
    embed: Any = target.shared.embed_tokens
    return dict(zip(SHARED, (embed.weight, target.lm_head_weight), strict=True))


def read_mtp(source: Source, target: FrozenTarget) -> Reading | None:
    """Read the modules in a folder with the target's own config.json, or in a whole checkpoint of the target."""
    config = source.config.get("text_config") or source.config
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or not any(count_modules(layout, source.files, layers) for layout in LAYOUTS.values()):
        return None
    check_same(
        source, target, width=config.get("hidden_size"), vocabulary=config.get("vocab_size"), number_of_layers=layers
    )
    native = read_native(source, target.config, shared_layers(target))
    loader = MTP.get(named_class(source.config) or "")
    differs = () if loader is None else loader.differs
    return Reading("modules of multi-token prediction", native_config(target, native), native.weights, differs)


FORMAT = Format(
    read=read_mtp,
    engine_config=mtp_engine_config,
    readers={VLLM: vllm("mtp"), SGLANG: sglang("NEXTN")},
    check=check_mtp,
)
