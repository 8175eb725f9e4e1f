"""A draft model's folder: an ordinary causal LM of Hugging Face's form, with its tokenizer."""

from pathlib import Path
from typing import Any

from heads.formats.base import SGLANG, VLLM, Folder, Format, fields, sglang, vllm
from heads.target.frozen import load_tokenizer


def draft_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json: the model's own, from a `DraftConfig`."""
    return {**config.model, "dtype": dtype, "torch_dtype": dtype}


def write_tokenizer(folder: Path, target: dict[str, Any]) -> None:
    """The tokenizer's files, so that the folder is a whole model."""
    load_tokenizer(target["name"]).save_pretrained(folder)


def check_draft(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    """A draft model, which is an ordinary model of Hugging Face's form."""
    name = str((folder.config.get("architectures") or [None])[0])
    lacks = None if name.endswith("ForCausalLM") else f"takes no {name} as a draft model"
    return lacks, fields(folder.config, {"vocab_size": folder.target["vocab_size"]})


FORMAT = Format(
    engine_config=draft_engine_config,
    readers={VLLM: vllm("draft_model"), SGLANG: sglang("STANDALONE")},
    check=check_draft,
    write_beside=write_tokenizer,
)
