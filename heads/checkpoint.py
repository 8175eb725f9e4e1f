"""Heads on disk: config.json and a file of tensors, the form that engines load, with what draftsmith needs beside it.

Each kind of head says which tensors it saves, in which file, and what engines want to read in config.json. Everything
of ours stands there under one key, `draftsmith`, which engines ignore. A save is complete or absent.
`heads.formats.contract` says which engines load a saved head.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.hub import cached_file

from heads.adapter import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, merge_adapter
from heads.errors import UserError, first_line
from heads.formats.contract import Verdict, check_folder
from heads.hub import repo_and_revision
from heads.registry import HEADS, kind_of
from heads.target import FrozenTarget

FORMAT = 1
CONFIG = "config.json"
WEIGHTS = sorted({head.weights_file for head in HEADS.values()})
"""Names of the file with a head's tensors."""
NOT_ITS_OWN = ("_name_or_path", "grown_from")
"""Keys of a target's config that say where it comes from."""


@runtime_checkable
class WithFiles(Protocol):
    """A head whose folder holds more than its config and weights."""

    def write_beside(self, folder: Path, target: dict[str, Any]) -> None:
        """Write the other files; `target` is `target_record`."""


def target_record(target: FrozenTarget) -> dict[str, Any]:
    """What a head remembers of the target it was trained for, and under `config` the target's own config.json, which
    is not kept but where a head's format asks for it."""
    config = target.config
    whole: dict[str, Any] = json.loads(target.model.config.to_json_string())
    return {
        "name": target.name,
        "architecture": type(target.model).__name__,
        "fingerprint": target.fingerprint,
        "quantize": target.quantize,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
        "adapter": target.adapter,
        "bos_token_id": getattr(config, "bos_token_id", None),
        "eos_token_id": getattr(config, "eos_token_id", None),
        "pad_token_id": getattr(config, "pad_token_id", None),
        "config": {key: value for key, value in whole.items() if key not in NOT_ITS_OWN},
    }


def save_head(
    head: Any,
    folder: str | Path,
    *,
    target: dict[str, Any],
    provenance: dict[str, Any] | None = None,
    write_adapter: Callable[[Path], dict[str, Any]] | None = None,
) -> None:
    """Write a head into `folder`, replacing what is there. `target` is `target_record` of the target it belongs to.

    `write_adapter` writes the adapter of that target into a folder, and returns what is to be said of it.
    """
    folder = Path(folder)
    fresh, old = _beside(folder, "new"), _beside(folder, "old")
    ours: dict[str, Any] = {
        "format": FORMAT,
        "kind": kind_of(head),
        "config": asdict(head.config),
        "target": {key: value for key, value in target.items() if key != "config"},
        "provenance": provenance or {},
    }
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        weights = {name: value.detach().cpu().contiguous().clone() for name, value in head.saved().items()}
        file = fresh / head.weights_file
        save_file(weights, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors leaves it readable by its owner alone
        ours["sha256"] = file_hash(file)
        if write_adapter is not None:
            ours["target"]["adapter"] = write_adapter(fresh / ADAPTER)
        ours["seal"] = seal(ours)
        config = {**head.engine_config(target, dtype), "draftsmith": ours}
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if isinstance(head, WithFiles):
            head.write_beside(fresh, target)
        for path in sorted(path for path in fresh.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        fresh.rename(folder)
    finally:
        _restore(folder)
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(record: dict[str, Any]) -> str:
    """SHA-256 of what a record says of the head itself, of its weights and of its target."""
    said = [record.get(key) for key in ("kind", "config", "target", "sha256")]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def _restore(folder: Path) -> None:
    """Put the old head back where a save was cut off between its two renames."""
    if not folder.exists():
        with suppress(OSError):
            _beside(folder, "old").rename(folder)


def load_head(path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Any:
    """Load a head from its folder, from the folder of the run that made it, or from the hub; strictly.

    Raises UserError where nothing is found, a file is damaged, or a tensor is missing, unknown or of another shape.
    """
    folder = find_head(path)
    record = read_config(folder)
    file = folder / HEADS[record["kind"]].weights_file
    try:
        weights = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{file}: truncated or damaged ({first_line(error)}); fetch or train it again") from error
    head = _make_head(folder, record, weights)
    expected, found = forms(head.saved()), forms(weights)
    for name in sorted(expected.keys() | found.keys()):
        ours, theirs = expected.get(name, "no such tensor"), found.get(name, "none")
        if ours != theirs:
            raise UserError(f"{file}: tensor {name}: by {CONFIG} beside it expected {ours}, found {theirs}")
        if not weights[name].isfinite().all():
            raise UserError(f"{file}: tensor {name} holds values that are not finite; fetch or train it again")
    if file_hash(file) != record.get("sha256"):
        raise UserError(
            f"{file}: changed since it was saved: not the file that {CONFIG} was written for; fetch it again"
        )
    head.restore(weights)
    return head.to(device=device, dtype=dtype).eval()


def forms(weights: dict[str, Tensor]) -> dict[str, str]:
    """Shape and kind of number of each tensor; floating-point tensors may come in any width."""
    return {
        name: f"{tuple(value.shape)} {'floating-point' if value.is_floating_point() else value.dtype}"
        for name, value in weights.items()
    }


def _make_head(folder: Path, record: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """The empty head that the record describes."""
    try:
        return HEADS[record["kind"]].from_record(record["config"], weights)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    except (TypeError, ValueError, LookupError, RuntimeError, ArithmeticError, AttributeError) as error:
        raise UserError(
            f"{folder / CONFIG}: damaged: describes no head ({first_line(error)}); fetch or train it again"
        ) from error


def find_head(path: str | Path) -> Path:
    """The folder with the head's two files: `path` itself, its head/ folder, or a snapshot from the hub."""
    try:
        for folder in (Path(path), Path(path) / "head"):
            _restore(folder)
            if (folder / CONFIG).is_file() and any((folder / name).is_file() for name in WEIGHTS):
                return folder
        is_here = Path(path).exists()
    except (OSError, ValueError) as error:  # a name too long, a null byte
        raise UserError(f"{path}: no path that can be read ({first_line(error)}); name a head's folder") from None
    repo, revision = repo_and_revision(str(path))
    if is_here or repo.startswith((".", "/")) or repo.count("/") != 1:
        raise UserError(
            f"{path}: no head there; expected a folder with {CONFIG} and {' or '.join(WEIGHTS)}, a run directory, or a "
            "hub id"
        )
    folder = _from_hub(path, repo, revision, CONFIG).parent
    _from_hub(path, repo, revision, HEADS[read_config(folder)["kind"]].weights_file)
    if read_config(folder)["target"].get("adapter"):
        with suppress(OSError, ValueError):  # said by who reads them
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                cached_file(repo, f"{ADAPTER}/{name}", revision=revision)
    return folder


def _from_hub(path: str | Path, repo: str, revision: str | None, name: str) -> Path:
    """One file of a head on the hub."""
    try:
        return Path(str(cached_file(repo, name, revision=revision)))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: neither a folder here nor a head on the hub ({first_line(error)}); "
            "check the name, and the network"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Our section of a head's config.json."""
    file = folder / CONFIG
    try:
        record: Any = json.loads(file.read_text()).get("draftsmith")
    except (ValueError, AttributeError, OSError, RecursionError) as error:
        raise UserError(f"{file}: not a JSON object ({first_line(error)}); fetch or train the head again") from error
    if not isinstance(record, dict) or str(record.get("kind")) not in HEADS:
        raise UserError(f"{file}: no head of a known kind ({', '.join(HEADS)}); was it made by draftsmith?")
    if record.get("format") != FORMAT:
        raise UserError(
            f"{file}: format {record.get('format')}, this version reads {FORMAT}; use the one that wrote it"
        )
    target_keys = {"name", "fingerprint", "hidden_size", "vocab_size", "num_layers"}
    for section, keys in (("config", HEADS[record["kind"]].FROM_TARGET), ("target", target_keys)):
        held = record[section].keys() if isinstance(record.get(section), dict) else set()
        if absent := keys - held:
            raise UserError(f"{file}: draftsmith.{section} lacks {min(absent)}; fetch or train it again")
    if record.get("seal", seal(record)) != seal(record):  # heads of before there was one have none
        raise UserError(f"{file}: draftsmith was changed since it was saved; fetch or train it again")
    return record


def check_loaders(path: str | Path, *, name: str = "HEAD", base: str = "TARGET", steps: int = 1) -> list[Verdict]:
    """What engines make of a saved head, as `heads.formats.contract.check_folder` says."""
    folder = find_head(path)
    record = read_config(folder)
    kind = record["kind"]
    return check_folder(folder, kind, HEADS[kind].weights_file, record["target"], name=name, base=base, steps=steps)


def adapt_target(path: str | Path, target: FrozenTarget) -> None:
    """Give a target the adapter that lies beside a head, if there is one. UserError where they do not belong
    together."""
    folder = find_head(path)
    trained_for = read_config(folder)["target"]
    if facts := trained_for.get("adapter"):
        _check_base(path, trained_for, target)
        merge_adapter(target, folder / ADAPTER, facts)


def check_fits(path: str | Path, target: FrozenTarget) -> None:
    """Refuse a head that was trained for another target: another width, vocabulary, depth, other weights or with
    another adapter.

    A target's quantised forms count as that target: which of them a head is run on is its user's choice.
    """
    trained_for = read_config(find_head(path))["target"]
    _check_base(path, trained_for, target)
    if trained_for.get("adapter") != target.adapter:
        which = "the target with the adapter in its folder" if trained_for.get("adapter") else "the target as it is"
        raise UserError(f"{path}: trained for {which}, which this one is not; measure it on its own target")


def _check_base(path: str | Path, trained_for: dict[str, Any], target: FrozenTarget) -> None:
    known = trained_for["name"]  # none in a published head of a target in a folder
    where = "a target" if known is None else f"target {known}"
    for name, ours, theirs in (
        ("hidden size", trained_for["hidden_size"], target.hidden_size),
        ("vocabulary", trained_for["vocab_size"], target.vocab_size),
        ("number of layers", trained_for["num_layers"], target.num_layers),
        ("fingerprint of the weights", _weights(str(trained_for["fingerprint"])), _weights(target.fingerprint)),
    ):
        if ours != theirs:
            # The fingerprint holds for every dtype but this one, whose range cuts small weights off.
            narrow = name.startswith("fingerprint") and target.dtype == torch.float16
            remedy = "float16 cuts small weights off: ask for bfloat16" if narrow else "measure it on its own target"
            raise UserError(f"{path}: trained for {where} with {name} {ours}, but {target.name} has {theirs}; {remedy}")


def _weights(fingerprint: str) -> str:
    """The fingerprint less the mark of a quantised form."""
    return fingerprint.partition("-")[0]
