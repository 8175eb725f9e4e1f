"""Folder of an MTP head: config.json is the target's own, and the weights are only the modules, under the names of the
target's family (`heads.methods.mtp`). Engines load it together with the target, whose embeddings and output head they
use.
"""

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from heads.core.engines import SGLANG, VLLM
from heads.core.serve_commands import sglang, vllm
from heads.core.strict_settings import SAVED
from heads.foreign.published_files import Reading, Source, check_same
from heads.formats.engine_folder import TRIED, Folder, Format, Shapes, named_class, with_both_rotations
from heads.methods.mtp import MtpConfig
from heads.methods.mtp_names import LAYOUTS, PARTS, Layout, count_modules, read_native, to_field
from heads.parts.family_layers import BlockMaker, block_record
from heads.targets.families import register_mimo, rope_scaling, rope_theta
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import repo_and_revision

CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")
"""Part of the path of a model in the Hub's cache, with owner and name."""


def mtp_engine_config(config: object, target: dict[str, Any], dtype: str) -> dict[str, object]:
    """Return config.json: the target's own, from `heads.saved.target_record`. Engines find the modules' class with
    it.

    The modules are not quantised, even if the target's checkpoint is. The config's own code stays in the target's
    folder, and `auto_map` says where that is, unless transformers cannot read that place.
    """
    fields = {key: value for key, value in target["config"].items() if key != "quantization_config"}
    if "auto_map" in fields:
        place, _ = repo_and_revision(str(target["name"]))
        place = os.path.abspath(place) if os.path.isdir(place) else place
        if cached := CACHED.search(f"{place}/"):
            place = "/".join(cached.groups())
        names = fields["auto_map"].items()
        fields["auto_map"] = {key: name if "--" in str(name) else f"{place}--{name}" for key, name in names}
        if "--" in place:  # transformers splits there
            del fields["auto_map"]
    return with_both_rotations(fields)


VOCABULARY = ("d2t", "t2d", "token_map")
"""Names of the tensors of a draft vocabulary."""


@dataclass(frozen=True)
class MtpLoader:
    """How engines load the modules of one class of targets."""

    layout: str
    """One of LAYOUTS."""
    count: str
    """Field of the target's config with the number of modules."""
    max_modules: Mapping[str, float]
    """Maximum number of modules that each engine loads. Engines that are not listed cannot load any."""
    differs: tuple[str, ...] = ()
    """Ways in which an engine computes differently from this head."""


ONE_EACH = {VLLM: 1, SGLANG: 1}
DEEPSEEK = {VLLM: math.inf, SGLANG: 1}
FIRST_TOKEN = f"{SGLANG} reads the token at position 0 too, which this head and {VLLM} read as zeros"
PRE_NORM = f"{VLLM} recycles the state before shared_head.norm from the second draft token on, this head that after it"
POST_NORM = f"passes the state after the target's final norm, this head and {VLLM} pass that before"
QWEN3_5 = MtpLoader("qwen", "mtp_num_hidden_layers", ONE_EACH)
MTP = {
    "DeepseekV3ForCausalLM": MtpLoader("deepseek", "num_nextn_predict_layers", DEEPSEEK, (FIRST_TOKEN,)),
    "Glm4MoeForCausalLM": MtpLoader("deepseek", "num_nextn_predict_layers", DEEPSEEK, (FIRST_TOKEN, PRE_NORM)),
    # vLLM looks for the modules of this family at layer 0, because its config override says that the target has no
    # layers.
    "Glm4MoeLiteForCausalLM": MtpLoader("deepseek", "num_nextn_predict_layers", {SGLANG: 1}, (FIRST_TOKEN,)),
    "MiMoForCausalLM": MtpLoader("mimo", "num_nextn_predict_layers", ONE_EACH, (f"{SGLANG} {POST_NORM}",)),
    "Qwen3NextForCausalLM": MtpLoader("qwen", "num_nextn_predict_layers", ONE_EACH),
    **{f"Qwen3_5{size}For{task}": QWEN3_5 for size in ("", "Moe") for task in ("CausalLM", "ConditionalGeneration")},
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
    modules = {f"mtp_layers.{i}.{name}": tensor for i in range(count) for name, tensor in module.items()}
    saved = to_field(modules, layout, config.num_hidden_layers, stored)
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}


def compare_tensors(expected: Shapes, found: Shapes) -> list[str]:
    """Return the differences of the tensors' names and shapes."""
    errors = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in expected and name in VOCABULARY:
            errors.append(f"{name}: expected none, no draft vocabulary is read here")
        elif name not in found:
            errors.append(f"{name}: expected {expected[name]}, found none: it would be whatever memory holds")
        elif expected.get(name) != found[name]:
            errors.append(f"{name}: expected {expected.get(name, 'no such tensor')}, found {found[name]}")
    return errors


def whole_passes(config: Mapping[str, Any], steps: int) -> int:
    """Return the number of draft tokens of vLLM, which drafts with all modules, once or several times."""
    modules: int = config["num_modules"]
    return max(steps // modules, 1) * modules


def check_mtp(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    """Compare modules of multi-token prediction with those that an engine loads for the target's own config.json."""
    name = str(named_class(folder.config))
    loader = MTP.get(name)
    if loader is None or reader not in loader.max_modules:
        return f"loads no modules of a {name}", []
    register_mimo()
    fields = {key: value for key, value in folder.config.items() if key not in ("draftsmith", "auto_map")}
    config: Any = AutoConfig.for_model(**fields).get_text_config()
    head, layout = MtpConfig.from_plain(folder.config["draftsmith"]["config"], SAVED), LAYOUTS[loader.layout]
    count = count_modules(layout, folder.shapes, config.num_hidden_layers)
    errors = []
    if not head.native and (head.rope_theta, head.rope_scaling) != (rope_theta(config), rope_scaling(config)):
        errors.append("config.json: rope_parameters: not those that the modules were trained with")
    promised = getattr(config, loader.count, None)
    if promised not in (None, count):
        errors.append(f"config.json: {loader.count}: {promised}, the file holds {count} modules")
    unsupported = None
    if count > loader.max_modules[reader]:
        unsupported = f"takes at most {loader.max_modules[reader]} module, the head has {count}"
    elif loader.layout == "mimo" and reader == SGLANG:
        unsupported = POST_NORM
    return unsupported, errors + compare_tensors(
        module_shapes(config, layout, max(count, 1), folder.shapes), folder.shapes
    )


def read_mtp(source: Source, target: FrozenTarget) -> Reading | None:
    """Read the modules in a folder with the target's own config.json, or in a whole checkpoint of the target."""
    config = source.config.get("text_config") or source.config
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or not any(count_modules(layout, source.files, layers) for layout in LAYOUTS.values()):
        return None
    check_same(
        source, target, width=config.get("hidden_size"), vocabulary=config.get("vocab_size"), number_of_layers=layers
    )
    settings, weights = read_native(source.path, source.files, source.read, target)
    loader = MTP.get(named_class(source.config) or "")
    differs = () if loader is None else loader.differs
    return Reading("modules of multi-token prediction", settings, weights, differs)


FORMAT = Format(
    read=read_mtp,
    engine_config=mtp_engine_config,
    readers={VLLM: vllm("mtp"), SGLANG: sglang("NEXTN")},
    check=check_mtp,
    nearest_steps=whole_passes,
    grows_trees=True,
    tried=TRIED.replace("heads of this kind", "modules of MiMo's family"),
    tried_settings={"layout": "mimo"},
)
