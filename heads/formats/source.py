"""Files of a checkpoint that others wrote: config.json and tensors, in a folder or on the Hub.

Tensors are read from safetensors. Reading a pickle can run code, so it is read only if the user names the file itself,
as in FOLDER/pytorch_model.bin or OWNER/NAME/pytorch_model.bin, and then only its tensors.
"""

import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from heads.errors import UserError, first_line
from heads.target.hub import is_hub_id, repo_and_revision

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
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
        """Return the tensors with these names, or all tensors."""
        wanted = set(self.files if names is None else names)
        out: dict[str, Tensor] = {}
        for file in sorted({self.files[name] for name in wanted}):
            if file.name in PICKLES:
                out |= {name: value for name, value in unpickled(file).items() if name in wanted}
                continue
            with safe_open(file, framework="pt") as opened:
                out |= {name: opened.get_tensor(name) for name in wanted if self.files[name] == file}
        return out


def without_pickle(path: str) -> tuple[str, str | None]:
    """Split the name of a pickle off the end of a path or Hub id. The name is None if there is none."""
    folder, slash, name = path.rpartition("/")
    return (folder, name) if slash and name in PICKLES else (path, None)


def foreign_config(path: str) -> dict[str, Any] | None:
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


def open_source(path: str, config: Mapping[str, Any]) -> Source:
    """Return the checkpoint at `path`: a folder, a Hub id, or either with the name of a pickle."""
    folder, name = without_pickle(path)
    if name is None:
        return Source(path, config, tensor_files(path, WEIGHTS))
    repo, revision = repo_and_revision(folder)
    try:
        file = Path(str(cached_file(repo, name, revision=revision)))
    except DAMAGE as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); fetch it again") from error
    return Source(path, config, dict.fromkeys(unpickled(file), file))


def unpickled(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle, read with `weights_only`. Raises UserError if it holds anything else."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (*DAMAGE, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: damaged, or holds more than tensors ({first_line(error)}); fetch it again") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{file}: expected named tensors; fetch a head's weights")
    return found


def tensor_files(path: str, names: Iterable[str] = WEIGHTS[:1]) -> dict[str, Path]:
    """Return the safetensors file of each tensor of the checkpoint at `path`, a folder or a Hub id. The file is one of
    `names`, or the index names it."""
    repo, revision = repo_and_revision(path)

    def find(name: str) -> str | None:
        return cached_file(repo, name, revision=revision, _raise_exceptions_for_missing_entries=False)

    try:
        index = find(INDEX)
        if index is not None:
            parts = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
            files = [Path(str(cached_file(repo, part, revision=revision))) for part in parts]
        else:
            files = [Path(found) for name in names if (found := find(name)) is not None][:1]
        out: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                out |= dict.fromkeys(opened.keys(), file)
    except DAMAGE as error:
        raise UserError(
            f"{path}: its safetensors files cannot be read ({first_line(error)}); fetch them again"
        ) from error
    if not files:
        raise UserError(
            f"{path}: no {' or '.join(names)} there; fetch it again. A pickle is read where it is asked for by name: "
            f"{' or '.join(f'{path}/{file}' for file in PICKLES)}"
        )
    return out
