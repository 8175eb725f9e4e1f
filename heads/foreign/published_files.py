"""A head that another project saved: its files, in a folder or on the Hub, and the decoder that its config describes.

Tensors are read from safetensors. Reading a pickle can run code, so it is read only if the user names the file itself,
as in FOLDER/pytorch_model.bin or OWNER/NAME/pytorch_model.bin, and then only its tensors.
"""

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig
from transformers.utils.hub import cached_file

from heads.core.errors import UserError, first_line
from heads.parts.rotary import SCALINGS
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import is_hub_id, read_tensors, repo_and_revision, tensor_files

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
SECTIONS = ("type", "mrope_section", "mrope_interleaved")
"""Keys of rotary positions without effect in a text; `type` is the old name of `rope_type`."""
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError)
"""Errors that a damaged or absent file raises."""


@dataclass(frozen=True)
class Source:
    """A checkpoint, and the file that holds each tensor."""

    path: str
    """Path as the user named it."""
    config: Mapping[str, Any]
    """Contents of config.json."""
    files: Mapping[str, Path]

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        wanted = set(self.files if names is None else names)
        pickles = {file for file in self.files.values() if file.name in PICKLES}
        if pickles:
            return {name: value for name, value in unpickled(*pickles).items() if name in wanted}
        return read_tensors(self.files, wanted)


@dataclass(frozen=True)
class Reading:
    """A head that another project saved, converted to draftsmith's config and tensors."""

    form: str
    """Form in which the head was saved."""
    config: dict[str, object]
    """Config of the head, without the fields that have a default."""
    weights: dict[str, Tensor]
    """Tensors as the head's `to_checkpoint` returns them."""
    differs: tuple[str, ...] = ()
    """Ways in which an engine would load a different head than its trainer meant."""


def without_pickle(path: str) -> tuple[str, str | None]:
    folder, slash, name = path.rpartition("/")
    return (folder, name) if slash and name in PICKLES else (path, None)


def foreign_config(path: str) -> dict[str, object] | None:
    """Return config.json of a head or model in another project's form; None for one of draftsmith's, or if none can be
    read."""
    repo, revision = repo_and_revision(without_pickle(path)[0])
    try:
        if not Path(repo).is_dir() and not is_hub_id(repo):
            return None
        config = json.loads(Path(str(cached_file(repo, CONFIG, revision=revision))).read_text(encoding="utf-8"))
    except (*DAMAGE, RecursionError):  # reported when a head of draftsmith's is read
        return None
    return config if isinstance(config, dict) and "draftsmith" not in config else None


def open_source(path: str, config: Mapping[str, object]) -> Source:
    """Return the checkpoint at `path`: a folder, a Hub id, or either with the name of a pickle."""
    folder, name = without_pickle(path)
    if name is None:
        try:
            return Source(path, config, tensor_files(path, WEIGHTS))
        except UserError as error:
            names = " or ".join(f"{path}/{file}" for file in PICKLES)
            raise UserError(f"{error}. A pickle is read only by its name: {names}") from error
    repo, revision = repo_and_revision(folder)
    try:
        file = Path(str(cached_file(repo, name, revision=revision)))
    except DAMAGE as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); fetch it again") from error
    return Source(path, config, dict.fromkeys(unpickled(file), file))


def unpickled(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle, read with `weights_only`. Raises UserError if it holds anything else."""
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except (*DAMAGE, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: damaged, or holds more than tensors ({first_line(error)}); fetch it again") from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{file}: expected named tensors; fetch a head's weights")
    return weights


def check_same(source: Source, target: FrozenTarget, **sizes: int | None) -> None:
    """Raise UserError for a head of another target. `sizes`: those in the head's files, None for unknown ones."""
    ours = {"width": target.hidden_size, "vocabulary": target.vocab_size, "number_of_layers": target.num_layers}
    for name, value in sizes.items():
        if value is not None and value != ours[name]:
            raise UserError(
                f"{source.path}: made for a target with {name.replace('_', ' ')} {value}, but {target.name} has "
                f"{ours[name]}; measure it on its own target"
            )


def decoder_settings(source: Source, fields: Mapping[str, Any], kind: str, target: FrozenTarget) -> tuple[Any, Any]:
    """Return the transformers config for the part `fields` of config.json, of type `kind` if it names none, and the
    settings of a `heads.parts.layers.BlockConfig` for it, with `rope_scaling` None for plain positions.

    Positions in time, height and width are equal in a text, so the sections of a vision-language model do not matter.
    """
    try:
        by_head = [fields[name] for name in ("num_attention_heads", "head_dim") if fields.get(name)]
        # transformers' Llama has no width that is not a multiple of its heads; where both sizes are named, it may be.
        width = {"hidden_size": prod(by_head)} if len(by_head) == 2 else {}
        config: Any = AutoConfig.for_model(**{"model_type": kind, **fields, **width})
    except Exception as error:  # each family's config refuses in its own way
        raise UserError(f"{source.path}: config.json describes no decoder layer ({first_line(error)})") from error
    config.hidden_size = fields.get("hidden_size", config.hidden_size)
    rope = {key: value for key, value in (config.rope_parameters or {}).items() if key not in SECTIONS}
    theta = float(rope.pop("rope_theta", 10_000.0))
    scaling = rope.get("rope_type", "default")
    if scaling in ("default", "mrope"):
        scaling = "default"
        rope = {"rope_type": "default", "partial_rotary_factor": rope.get("partial_rotary_factor", 1)}
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    heads = config.num_attention_heads
    block = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_target_layers": target.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
    }
    unread = {
        "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
        "rope_parameters": scaling not in SCALINGS,
    }
    refuse_settings(source, unread)
    return config, block


def refuse_settings(source: Source, unread: Mapping[str, object]) -> None:
    """Raise UserError for a setting of config.json that heads here do not support. `unread` is true for those that are
    set."""
    for name, is_set in unread.items():
        if is_set:
            raise UserError(f"{source.path}: config.json: {name}: heads with such a setting are not read here")


def check_streams(source: Source, ids: Sequence[int], target: FrozenTarget) -> None:
    """Raise UserError for residual streams, numbered by the layer that they enter, that the target does not have."""
    if not all(0 <= k <= target.num_layers for k in ids):
        raise UserError(
            f"{source.path}: reads the streams that enter layers {list(ids)}, but {target.name} has "
            f"{target.num_layers} layers; measure it on its own target"
        )


def is_same_table(table: Tensor, ours: Tensor) -> bool:
    """Return True if `table` is the target's own, in whatever precision either of the two was saved."""
    ours = ours.detach().cpu()
    if table.shape != ours.shape:
        return False
    return torch.equal(table.to(ours.dtype), ours) or torch.equal(ours.to(table.dtype), table)
