"""Folder of an EAGLE-3 head: config.json as vLLM and SGLang read it, and the tensors under the names that they load.

Layer ids are written in both conventions: vLLM numbers a stream by the layer that it enters, SGLang by the layer that
it leaves. The EAGLE repository reads the file too, but it ignores the layer ids (it only supports the default ones),
`fc_norm` and `norm_output`. speculators' converter (c05b95b) keeps the options and drops the layer ids, unless they are
given by hand.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heads.core.engines import ENGINES, LLAMACPP, OPENVINO, SGLANG, VLLM, rotation_errors
from heads.core.serve_commands import llama_cpp, openvino, sglang, vllm
from heads.core.strict_settings import SAVED
from heads.foreign.published_eagle3 import EMBEDDING, IDS, QWEN3, UNEVEN, read_eagle3
from heads.formats.engine_folder import TRIED, Folder, Format, decoder_config
from heads.formats.target_classes import LLAMACPP_TARGETS, OPENVINO_TARGETS, SGLANG_TARGETS, VLLM_TARGETS
from heads.methods.eagle3 import Eagle3Config
from heads.parts.head_shape import low_middle_high
from heads.parts.layers import SLIDING

EAGLE = "the EAGLE repository (cb7e084)"
LLAMA = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


def eagle3_engine_config(config: Eagle3Config, target: Mapping[str, object], dtype: str) -> dict[str, object]:
    """Return config.json under the engines' names."""
    fields = {
        **(QWEN3 if config.qk_norm else LLAMA),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
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
        # SGLang numbers a stream by the layer that it leaves; -1 = the embeddings.
        "eagle_config": {"use_aux_hidden_state": True, IDS: [k - 1 for k in config.aux_layer_ids]},
    }
    if config.sliding_window is not None:
        fields |= {"sliding_window": config.sliding_window, "layer_types": [SLIDING] * config.num_layers}
    if config.target_hidden_size is not None:
        fields |= {"target_hidden_size": config.target_hidden_size}
    return fields


@dataclass(frozen=True, kw_only=True)
class Eagle3Reader:
    """Limits of one reader of EAGLE-3 heads."""

    targets: frozenset[str]
    """Classes of targets whose residual streams the reader passes to a head."""
    options: frozenset[str] = frozenset()
    """Settings of a head that the reader supports. It ignores the others."""
    reads_ids: bool = True
    """False if the reader only supports the default layers."""
    reads_last: bool = False
    """True if the reader captures the output of the last layer."""
    fc_by_width: bool = True
    """True if the reader applies `fc` only where its inputs are not as wide as the head."""
    max_layers: int | None = None
    """Maximum number of decoder layers that the reader runs, None for no limit."""
    three_inputs: bool = False
    """True if the reader refuses heads that read other than three layers of the target, or have several layers."""
    refuses: frozenset[str] = frozenset()
    """Settings of a head that the reader refuses."""
    own_embeddings: bool = True
    """False if the reader puts the target's embeddings in the place of the head's."""


OPTIONS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "sliding_window")
READERS = {
    VLLM: Eagle3Reader(targets=VLLM_TARGETS, options=frozenset(OPTIONS), reads_last=True, fc_by_width=False),
    # The window is an option of SGLang's command.
    SGLANG: Eagle3Reader(targets=SGLANG_TARGETS, options=frozenset(OPTIONS) - {"norm_before_residual"}),
    # The converter stops at the tensors of fc_norm. It drops norm_output and the window without a word.
    LLAMACPP: Eagle3Reader(
        targets=LLAMACPP_TARGETS,
        options=frozenset({"norm_before_fc", "norm_before_residual"}),
        reads_last=True,
        fc_by_width=False,
        three_inputs=True,
        refuses=frozenset({"fc_norm"}),
    ),
    OPENVINO: Eagle3Reader(targets=OPENVINO_TARGETS, fc_by_width=False, three_inputs=True, own_embeddings=False),
    EAGLE: Eagle3Reader(targets=frozenset({"LlamaForCausalLM", "Qwen3ForCausalLM"}), reads_ids=False, max_layers=1),
}


def check_eagle3(folder: Folder, name: str) -> tuple[str | None, list[str]]:
    config, reader = Eagle3Config.from_plain(folder.config["draftsmith"]["config"], SAVED), READERS[name]
    architecture = str(folder.target.get("architecture"))
    unsupported = None
    if config.qk_norm and name != VLLM:
        unsupported = "runs no head that norms queries and keys"
    elif architecture not in reader.targets:
        unsupported = f"hands no residual streams of a {architecture} to a head"
    elif refused := [option for option in OPTIONS if getattr(config, option) and option in reader.refuses]:
        unsupported = f"refuses heads with {refused[0]}"
    elif reader.three_inputs and len(config.aux_layer_ids) != 3:
        unsupported = f"takes heads that read three layers of the target, not {len(config.aux_layer_ids)}"
    elif reader.three_inputs and config.num_layers != 1:
        unsupported = f"takes heads of one layer, not {config.num_layers}"
    ids, layers, D = list(config.aux_layer_ids), config.num_target_layers, config.hidden_size
    width, default = config.target_hidden_size or D, list(low_middle_high(config.num_target_layers))
    read = reader.options | reader.refuses
    ignored = [option for option in OPTIONS if getattr(config, option) and option not in read]
    errors = [f"config.json: {option}: is not read, so another head would run" for option in ignored]
    errors += rotation_errors(folder.config, name)
    if config.own_embeddings and (not reader.own_embeddings or (name == SGLANG and width == D)):
        errors.append(f"{EMBEDDING}: the target's own would take its place")
    if name in ENGINES and not config.qk_norm and D % config.num_attention_heads:
        errors.append(f"config.json: hidden_size: {D}: {UNEVEN}")
    if reader.max_layers is not None and config.num_layers > reader.max_layers:
        errors.append(f"config.json: num_hidden_layers: {config.num_layers}: only the first layer is run")
    if reader.fc_by_width and len(ids) * width == D:
        errors.append(f"fc is left out where it is as wide as the states that it reads, {D}: take more layers")
    if not reader.reads_ids and ids != default:
        errors.append(f"no layer ids are read: {default} would be captured in the place of {ids}")
    if max(ids) >= layers + reader.reads_last:
        errors.append(f"layer {max(ids)} of {layers}, the last one's output, is never captured: take lower ones")
    return unsupported, errors


PLAIN = (
    "this head is plain, so that every engine reads it: with fc_norm and norm_output, which vLLM and SGLang read, "
    "SmolLM2-135M's head had tau 1.80 in the place of 1.66 after 1.17 million tokens"
)


def other_forms(head: str, target: str, config: Mapping[str, Any]) -> list[str]:
    """Return lines with the command that converts a saved head into speculators' form, and what a plain head costs."""
    ids = json.dumps({"eagle_aux_hidden_state_layer_ids": list(config["aux_layer_ids"])})
    run = (
        f"speculators convert {shlex.quote(head)} --algorithm eagle3 --verifier {shlex.quote(target)} "
        f"--algorithm-kwargs {shlex.quote(ids)}"
    )
    lines = [f"speculators' converter drops the layer ids unless they are given: `{run}`"]
    return lines if config.get("fc_norm") or config.get("norm_output") else [*lines, PLAIN]


FORMAT = Format(
    read=read_eagle3,
    engine_config=eagle3_engine_config,
    readers={
        VLLM: vllm("eagle3"),
        SGLANG: sglang("EAGLE3"),
        LLAMACPP: llama_cpp("eagle3"),
        OPENVINO: openvino,
        EAGLE: lambda setting, _: (
            f"EaModel.from_pretrained(base_model_path={setting.target!r}, ea_model_path={setting.head!r})"
        ),
    },
    check=check_eagle3,
    grows_trees=True,
    quantizes=True,
    tried=TRIED,
    converters=other_forms,
)
