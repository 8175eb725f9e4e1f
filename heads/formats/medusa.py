"""Medusa's tensors and config.json under the names of the paper's own repository, which vLLM up to 0.32 supports.

    {k}.{j}.linear.{weight, bias}    residual block j of head k
    {k}.{number of blocks}.weight    output head of head k
    token_map                        the draft vocabulary, if there is one: no reader supports it with such output heads

The repository unpickles the tensors from medusa_lm_head.pt. draftsmith only writes medusa_lm_head.safetensors.
"""

import re
from collections.abc import Mapping
from typing import Any

from heads.core.errors import UserError
from heads.formats.engine_folder import TRIED, Folder, Format, Reading, Shapes, fields, sizes, tensors, vllm
from heads.formats.source import Source, check_same
from heads.targets.model import FrozenTarget

OLD_VLLM = "vLLM 0.32.0"
"""Last version with Medusa. SGLang never supported it."""
MEDUSA = "the Medusa repository (11af0aa)"
MEDUSA_TARGETS = frozenset({"LlamaForCausalLM"})
"""Classes of targets for which the Medusa repository runs heads. It unpickles medusa_lm_head.pt, with the same
tensors."""
MEDUSA_FIELDS: dict[str, Any] = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "medusa_fc_bias": True,  # without it vLLM silently drops the biases
}
MEDUSA_SIZES = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")


def medusa_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json under the repository's names, from a `MedusaConfig` and the record of its target, with the
    further fields that vLLM needs."""
    return {
        **MEDUSA_FIELDS,
        "medusa_num_heads": config.depth,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": target["name"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "original_lm_head": False,
        "torch_dtype": dtype,
    }


def medusa_tensors(c: Mapping[str, Any]) -> Shapes:
    """Return the shapes of Medusa heads with this config.json, over the target's whole vocabulary."""
    D, V, blocks = c["hidden_size"], c["vocab_size"], c["medusa_num_layers"]
    shapes: Shapes = {}
    for k in range(c["medusa_num_heads"]):
        for j in range(blocks):
            shapes |= {f"{k}.{j}.linear.weight": (D, D), f"{k}.{j}.linear.bias": (D,)}
        shapes[f"{k}.{blocks}.weight"] = (V, D)
    return shapes


def check_medusa(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    config, name = folder.config, str(folder.target.get("architecture"))
    lacks = f"runs no {name}" if reader == MEDUSA and name not in MEDUSA_TARGETS else None
    faults = fields(config, MEDUSA_FIELDS) + sizes(config, MEDUSA_SIZES)
    return lacks, faults or tensors(medusa_tensors(config), folder.shapes)


def read_medusa(source: Source, target: FrozenTarget) -> Reading | None:
    """Read heads under the repository's names, or under vLLM's: blocks.{k}.layers.{j}, lm_heads.{k}."""
    raw = source.config
    if not ("medusa_num_heads" in raw or raw.get("model_type") == "medusa"):
        return None
    weights = {re.sub(r"^medusa_heads?\.", "", name): value for name, value in source.read().items()}
    ours = {
        re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name): value for name, value in weights.items()
    }
    blocks = [match for name in ours if (match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.weight", name))]
    if not blocks:
        raise UserError(f"{source.path}: holds no tensor of a head, such as 0.0.linear.weight")
    heads, layers = (1 + max(int(match[group]) for match in blocks) for group in (1, 2))
    ours = {re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", name): value for name, value in ours.items()}
    width = ours[blocks[0][0]].shape[-1]
    out, token_map = ours.get(f"0.{layers}.weight"), ours.get("token_map")
    rows = None if out is None or token_map is not None else len(out)
    check_same(source, target, width=width, vocabulary=rows)
    said = [] if raw.get("medusa_fc_bias") else [f"{OLD_VLLM} drops the biases without medusa_fc_bias: true"]
    for match in blocks:
        if match[0].replace("weight", "bias") not in ours and raw.get("medusa_fc_bias") is False:
            ours[match[0].replace("weight", "bias")] = ours[match[0]].new_zeros(width)
            said = []
    if raw.get("medusa_num_heads", heads) != heads:
        said.append(f"{MEDUSA} drafts with {raw['medusa_num_heads']} of the {heads} heads, by medusa_num_heads")
    config = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size if token_map is None else len(token_map),
        "depth": heads,
        "num_layers": layers,
    }
    return Reading("Medusa heads", config, ours, tuple(said))


FORMAT = Format(
    read=read_medusa,
    weights_file="medusa_lm_head.safetensors",
    engine_config=medusa_engine_config,
    readers={OLD_VLLM: vllm("medusa"), MEDUSA: lambda _, head, *__: f"MedusaModel.from_pretrained({head!r})"},
    check=check_medusa,
    tried=TRIED,
)
