"""Merge of a peft adapter into a target's weights."""

import os
import re
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel

from heads.core.errors import UserError, first_line, warn_once
from heads.targets.encoder_decoder import find_head
from heads.targets.hub import is_here, repo_and_revision, tensor_files

ADAPTED = re.compile(r"\.(modules_to_save|base_layer|token_adapter|lora_\w+)\b.*|\.\w+$")
"""What peft puts behind the name of a module to name one of its tensors."""
WHOLE = (".weight", ".modules_to_save.weight", ".base_layer.weight")
"""Names of a whole table, not of a change of it."""


def fit_rows(model: PreTrainedModel, path: str, adapter: str, settings: object) -> None:
    """Give the model at `path` as many rows for tokens as the tables in an adapter have. UserError if the adapter lacks
    one of the two tables, or all but some rows of it: the other new rows would be random. `settings`: the adapter's."""
    untyped: Any = model
    names = {module: name for name, module in model.named_modules()}
    tables = {names[module]: module.weight for module in (untyped.get_input_embeddings(), find_head(model))}
    table_rows: dict[str, int] = {}
    for key, file in tensor_files(adapter, ("adapter_model.safetensors",)).items():
        tensor = key.removeprefix("base_model.model.")
        name = ADAPTED.sub("", tensor)
        if name not in names.values():
            return  # it is for another architecture, which peft says
        if name in tables and tensor.removeprefix(name) in WHOLE:
            with safe_open(file, framework="pt") as opened:
                table_rows[name] = opened.get_slice(key).get_shape()[0]
    rows = max(table_rows.values(), default=0)
    single = getattr(settings, "trainable_token_indices", None) or getattr(settings, "token_indices", None) or []
    last = max(chain.from_iterable(single.values()) if isinstance(single, dict) else single, default=-1)
    if last >= max(rows, *map(len, tables.values())):
        name, weight = next(iter(tables.items()))
        raise UserError(
            f"{adapter}: holds the row of token {last} alone, and {name} has {len(weight)} rows in {path}; save the "
            "merged model, and name that"
        )
    if all(len(tables[name]) == size for name, size in table_rows.items()):
        return
    is_one = len({id(weight) for weight in tables.values()}) == 1
    ties = is_one and getattr(settings, "ensure_weight_tying", False)
    for name, weight in tables.items():
        if table_rows.get(name, rows if ties or len(weight) >= rows else 0) != rows:
            other, size = next(iter(table_rows.items()))
            raise UserError(
                f"{adapter}: {other} has {size} rows there and {len(tables[other])} in {path}, and the adapter has no "
                f"{name} of {rows}, where {path} has {len(weight)}; save the merged model, and name that"
            )
    untyped.resize_token_embeddings(rows, mean_resizing=False)


def check_adapter(adapter: str) -> None:
    """Raise UserError for a folder that holds no adapter in safetensors, with what it holds."""
    for name in ("adapter_config.json", "adapter_model.safetensors") if is_here(adapter) else ():
        if (Path(adapter) / name).is_file():
            continue
        why = ""
        if (Path(adapter) / "adapter_model.bin").is_file():
            why = "; pickled ones (.bin) are not read: load it with peft and call save_pretrained(FOLDER)"
        elif saved := sorted((path.parent for path in Path(adapter).glob(f"*/{name}")), key=os.path.getmtime):
            why = f"; {saved[-1]} holds one"
        raise UserError(f"{adapter}: expected a peft adapter, found no {name} in it{why}")


def merge_adapter(model: PreTrainedModel, path: str, adapter: str) -> PreTrainedModel:
    """Merge a peft adapter into the weights of the model at `path`, in place: for LoRA, W + alpha / rank * B A replaces
    W. The model gets the adapter's number of tokens. UserError if the adapter is missing, damaged, for another
    architecture, or of a kind that cannot be merged."""
    from peft import PeftConfig, PeftModel

    check_adapter(adapter)
    repo, revision = repo_and_revision(adapter)
    rows = model.config.get_text_config().vocab_size
    try:
        settings = PeftConfig.from_pretrained(repo, revision=revision)
        fit_rows(model, path, adapter, settings)
        base = settings.base_model_name_or_path
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # caused by peft
            opened: Any = PeftModel.from_pretrained(model, repo, revision=revision, config=settings)
        # A safe merge makes new tensors: changes to memory-mapped ones would be lost when their pages are released.
        merged: PreTrainedModel = opened.merge_and_unload(safe_merge=True)
    except UserError:
        raise
    except Exception as error:  # peft, safetensors and the hub raise many kinds of errors
        raise UserError(
            f"{adapter}: no adapter that can be merged into {path} ({first_line(error)}); name one that was trained "
            "for this model"
        ) from error
    if base and Path(repo_and_revision(base)[0]).name != Path(repo_and_revision(path)[0]).name:
        warn_once(f"{adapter}: was trained for {base}, and is merged into {path}")
    if (tokens := merged.config.get_text_config().vocab_size) != rows:
        warn_once(f"{adapter}: has {tokens} tokens, which replace the {rows} of {path}")
    return merged
