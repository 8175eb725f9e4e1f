"""Medusa's tensors and config.json under the names of the paper's own repository, which vLLM up to 0.32 supports.

    {k}.{j}.linear.{weight, bias}    residual block j of head k
    {k}.{number of blocks}.weight    output head of head k
    token_map                        the draft vocabulary, if there is one: no reader supports it with such output heads

The repository unpickles the tensors from medusa_lm_head.pt. draftsmith only writes medusa_lm_head.safetensors.
"""

import re
from collections.abc import Mapping

from heads.core.errors import UserError
from heads.core.serve_commands import vllm
from heads.foreign.published_files import Reading, Source, check_same
from heads.formats.engine_folder import TRIED, Folder, Format
from heads.methods.medusa import MedusaConfig
from heads.targets.frozen_target import FrozenTarget

OLD_VLLM = "vLLM 0.32.0"
"""Last version with Medusa. SGLang never supported it."""
MEDUSA = "the Medusa repository (11af0aa)"
MEDUSA_TARGETS = frozenset({"LlamaForCausalLM"})
"""Classes of targets for which the Medusa repository runs heads. It unpickles medusa_lm_head.pt, with the same
tensors."""


def medusa_engine_config(config: MedusaConfig, target: Mapping[str, object], dtype: str) -> dict[str, object]:
    """Return config.json under the repository's names, with the further fields that vLLM needs."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_fc_bias": True,  # without it vLLM silently drops the biases
        "medusa_num_heads": config.depth,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": target["name"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "original_lm_head": False,
        "torch_dtype": dtype,
    }


def check_medusa(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    name, config = str(folder.target.get("architecture")), folder.config
    unsupported = f"runs no {name}" if reader == MEDUSA and name not in MEDUSA_TARGETS else None
    has_vocabulary = config["truncated_vocab_size"] != config["vocab_size"]
    return unsupported, ["token_map: expected none, no draft vocabulary is read here"] if has_vocabulary else []


def read_medusa(source: Source, target: FrozenTarget) -> Reading | None:
    """Read heads under the repository's names, or under vLLM's: blocks.{k}.layers.{j}, lm_heads.{k}."""
    fields = source.config
    if not ("medusa_num_heads" in fields or fields.get("model_type") == "medusa"):
        return None
    weights = {}
    for name, value in source.read().items():
        name = re.sub(r"^medusa_heads?\.", "", name)
        weights[re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)] = value
    blocks = [match for name in weights if (match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.weight", name))]
    if not blocks:
        raise UserError(f"{source.path}: holds no tensor of a head, such as 0.0.linear.weight")
    depth = 1 + max(int(match[1]) for match in blocks)
    layers = 1 + max(int(match[2]) for match in blocks)
    weights = {re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", name): value for name, value in weights.items()}
    width = weights[blocks[0][0]].shape[-1]
    out, token_map = weights.get(f"0.{layers}.weight"), weights.get("token_map")
    check_same(source, target, width=width, vocabulary=None if out is None or token_map is not None else len(out))
    differs = [] if fields.get("medusa_fc_bias") else [f"{OLD_VLLM} drops the biases without medusa_fc_bias: true"]
    for match in blocks:
        bias = match[0].replace("weight", "bias")
        if bias not in weights and fields.get("medusa_fc_bias") is False:
            weights[bias] = weights[match[0]].new_zeros(width)
            differs = []
    if fields.get("medusa_num_heads", depth) != depth:
        differs.append(f"{MEDUSA} drafts with {fields['medusa_num_heads']} of the {depth} heads, by medusa_num_heads")
    config: dict[str, object] = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size if token_map is None else len(token_map),
        "depth": depth,
        "num_layers": layers,
    }
    return Reading("Medusa heads", config, weights, tuple(differs))


FORMAT = Format(
    read=read_medusa,
    weights_file="medusa_lm_head.safetensors",
    engine_config=medusa_engine_config,
    readers={
        OLD_VLLM: vllm("medusa", fixed=True),
        MEDUSA: lambda setting, _: f"MedusaModel.from_pretrained({setting.head!r})",
    },
    check=check_medusa,
    tried=TRIED,
)
