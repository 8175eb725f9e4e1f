"""Folder of a draft model: an ordinary Hugging Face causal LM with its tokenizer."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads.core.engines import LLAMACPP, MLX, SGLANG, VLLM
from heads.core.errors import warn_once
from heads.core.serve_commands import llama_cpp, mlx, sglang, vllm
from heads.foreign.published_files import Reading, Source
from heads.formats.engine_folder import TRIED, Folder, Format, named_class, with_both_rotations
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import TOKENIZER_CONFIG, has_file, tokenizer_files
from heads.targets.smaller_models import fit_vocabulary, load_smaller, model_record, own_weights
from heads.targets.target_files import load_tokenizer


def write_tokenizer(folder: Path, target: Mapping[str, Any]) -> None:
    """Copy the files of the target's tokenizer, or of its adapter's if that has one, so that the folder is a complete
    model. Those of a GGUF file are made from it."""
    name, gguf_file, adapter = target["name"], target.get("gguf_file"), target.get("adapter")
    if adapter is not None and has_file(adapter, TOKENIZER_CONFIG):
        name, gguf_file = adapter, None
    files = {} if gguf_file else tokenizer_files(name)
    for place, file in files.items():
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / place)
    if not files:
        trusted = target["trust_remote_code"]
        load_tokenizer(name, trust_remote_code=trusted, gguf_file=gguf_file).save_pretrained(folder)
        warn_once(f"{folder}: the tokenizer's files beside the draft model are made from {gguf_file or name}")


def check_draft(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    name = str(named_class(folder.config))
    return None if name.endswith("ForCausalLM") else f"takes no {name} as a draft model", []


def read_draft(source: Source, target: FrozenTarget) -> Reading | None:
    """Read a causal LM with the target's tokenizer."""
    names = [str(name) for name in source.config.get("architectures") or ()]
    if not any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names):
        return None
    model: Any = load_smaller(source.path, target)
    rows = model.get_output_embeddings().weight.shape[0]
    common = fit_vocabulary(model, target.vocab_size)
    same = rows == target.vocab_size
    differs = () if same else (f"{VLLM} takes no draft model of {rows} tokens for a target of {target.vocab_size}",)
    config = {
        "path": source.path,
        "model": model_record(model),
        "vocab_size": target.vocab_size,
        "common_size": common,
    }
    return Reading("language model", config, own_weights(model), differs)


FORMAT = Format(
    read=read_draft,
    engine_config=lambda config, target, dtype: {
        **with_both_rotations(config.model),
        "dtype": dtype,
        "torch_dtype": dtype,
    },
    readers={
        VLLM: vllm("draft_model"),
        SGLANG: sglang("STANDALONE"),
        LLAMACPP: llama_cpp("simple"),
        MLX: mlx,
    },
    check=check_draft,
    grows_trees=True,
    quantizes=True,
    tried=TRIED,
    write_beside=write_tokenizer,
)
