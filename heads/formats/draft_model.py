"""Folder of a draft model: an ordinary Hugging Face causal LM with its tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads.core.engines import SGLANG, VLLM
from heads.foreign.published_files import Reading, Source
from heads.formats.engine_folder import TRIED, Folder, Format, named_class, sglang, vllm
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_tokenizer
from heads.targets.smaller_models import fit_vocabulary, load_smaller, model_record, own_weights


def write_tokenizer(folder: Path, target: Mapping[str, Any]) -> None:
    """Write the tokenizer's files, so that the folder is a complete model."""
    tokenizer = load_tokenizer(
        target["name"],
        trust_remote_code=target["trust_remote_code"],
        gguf_file=target.get("gguf_file"),
        adapter=target.get("adapter"),
    )
    tokenizer.save_pretrained(folder)


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
    engine_config=lambda config, target, dtype: {**config.model, "dtype": dtype, "torch_dtype": dtype},
    readers={VLLM: vllm("draft_model"), SGLANG: sglang("STANDALONE")},
    check=check_draft,
    quantizes=True,
    tried=TRIED,
    write_beside=write_tokenizer,
)
