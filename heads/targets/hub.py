"""Names of models on the Hugging Face Hub: OWNER/NAME, or OWNER/NAME@REVISION with a branch, a tag or a commit; and the
files of their tensors."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.core.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

INDEX = "model.safetensors.index.json"
"""File that names the file of each tensor of a checkpoint with several files."""

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("*.tiktoken", "tekken.json", "chat_template.*", "additional_chat_templates/*.jinja", "tokenization_*.py"),
)
"""Patterns of the names of a tokenizer's files, chat templates included."""

NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
PINNED = re.compile(rf"({NAME}/{NAME})@([A-Za-z0-9_][A-Za-z0-9_./-]*)")
MODEL = re.compile(rf"(?:{NAME}/)?{NAME}")
"""Names of models. A few old ones have no owner."""


def is_here(name: str) -> bool:
    """Return True if there is a file or folder with this name. Return False for names that cannot be paths, such as too
    long ones."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def absolute(name: str) -> str:
    """Return a file or folder here by its absolute path, so that it is found from every folder, and other names as they
    are."""
    return os.path.abspath(name) if name and is_here(name) else name


def repo_and_revision(name: str) -> tuple[str, str | None]:
    """Split a name into the Hub's repository and revision. Local folders and names without @ are not split."""
    pinned = PINNED.fullmatch(name)
    if pinned is None or is_here(name):
        return name, None
    return pinned[1], pinned[2]


def is_hub_id(name: str) -> bool:
    """Return True if a name is a valid Hub id OWNER/NAME, with or without @REVISION, and not a local folder."""
    repo, _ = repo_and_revision(name)
    whole = re.fullmatch(f"{NAME}/{NAME}", repo) is not None
    return whole and "--" not in repo and ".." not in repo and len(repo) <= 96 and not Path(name).exists()


def name_of(path: str) -> str:
    """Return a name that reveals nothing about this machine: a Hub id unchanged, or the last part of a path or URL."""
    return path if "/" not in path or is_hub_id(path) else path.partition("?")[0].rstrip("/").rpartition("/")[2]


def with_names(value: object) -> Any:
    """Return a JSON value with its paths replaced with names (`name_of`), also in comma-separated lists."""
    match value:
        case dict():
            return {key: with_names(item) for key, item in value.items()}
        case list():
            return [with_names(item) for item in value]
        case str():
            return ",".join(name_of(part) for part in value.split(","))
        case _:
            return value


def has_file(path: str, name: str) -> bool:
    """Return True if the folder or Hub id has a file of this name. OSError or ValueError if that cannot be known."""
    return find_file(path, name) is not None


def find_file(path: str, name: str) -> Path | None:
    from transformers.utils.hub import cached_file

    repo, revision = repo_and_revision(path)
    found = cached_file(repo, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def local_folder(path: str) -> str:
    """Return the folder of a model that was loaded before: as it is, or that of the Hub's cache."""
    if is_here(path):
        return path
    try:
        file = find_file(path, "config.json")
    except (OSError, ValueError):
        file = None
    if file is None:
        raise UserError(f"{path}: is no folder here, and not in the Hub's cache; fetch it with `hf download {path}`")
    return str(file.parent)


def tokenizer_files(path: str | Path) -> dict[str, Path]:
    """Return the files of a tokenizer that lie in a folder, or in the Hub's cache of an id, by their names there."""
    folder = Path(path)
    if not folder.is_dir():
        found = find_file(str(path), TOKENIZER_CONFIG) or find_file(str(path), "tokenizer.json")
        if found is None:
            return {}
        folder = found.parent
    files = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
    return {file.relative_to(folder).as_posix(): file for file in sorted(files)}


def tokenizer_key(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hash of everything on which a tokenizer's ids depend, its chat template apart."""
    whole = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    parts = [type(tokenizer).__name__, whole, sorted(tokenizer.special_tokens_map.items()), tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def tensor_files(path: str, names: Iterable[str] = ("model.safetensors",)) -> dict[str, Path]:
    """Return the safetensors file of each tensor of the checkpoint at `path`, a folder or a Hub id. The file is one of
    `names`, or the index names it."""
    from safetensors import SafetensorError, safe_open
    from transformers.utils.hub import cached_file

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
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        reason = first_line(error)
        raise UserError(f"{path}: its safetensors files cannot be read ({reason}); fetch them again") from error
    if not files:
        raise UserError(f"{path}: no {' or '.join(names)} there; fetch it again")
    return out


def read_tensors(files: Mapping[str, Path], names: Iterable[str]) -> dict[str, "Tensor"]:
    from safetensors import safe_open

    out: dict[str, Tensor] = {}
    for file in sorted({files[name] for name in names}):
        with safe_open(file, framework="pt") as opened:
            out |= {name: opened.get_tensor(name) for name in names if files[name] == file}
    return out
