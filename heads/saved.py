"""Heads on disk: config.json and a file of tensors, in the form that engines load, with draftsmith's own record.

A head provides its tensors and its config. Its format (`heads.formats`) determines the file of the tensors and the
fields of config.json that engines read. draftsmith's own record is in config.json under the key `draftsmith`, which
engines ignore.

A save is complete or absent: the new folder is written beside the old one, and the two are swapped.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.hub import cached_file

from heads.core.contract import DraftHead
from heads.core.errors import UserError, first_line, warn_once
from heads.core.files import file_hash, is_full_disk, whole_folder
from heads.core.serve_commands import Setting
from heads.foreign.published_files import DAMAGE
from heads.formats.engine_folder import Verdict, check_contents
from heads.formats.quantized import dequantized
from heads.registry import HEADS, UNTRAINED, kind_of
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import absolute, repo_and_revision, with_names
from heads.targets.identity import changes

FORMAT = 1
CONFIG = "config.json"
WEIGHTS: list[str] = sorted({method.format.weights_file for method in HEADS.values()})
"""Possible names of the file with a head's tensors."""
NOT_SAVED = ("config", "trust_remote_code")
"""Keys of a target's record that are not repeated in a head's files."""


def target_record(target: FrozenTarget) -> dict[str, Any]:
    """Return the record of the target for a head's files, with the further keys that a head's format may need
    (`NOT_SAVED`). `config` is the target's own config.json."""
    config = target.config
    whole: dict[str, object] = json.loads(target.checkpoint_config.to_json_string())
    return {
        "name": absolute(target.name),
        "architecture": target.architecture,
        **target.identity,
        "quantize": target.quantize,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
        "context_length": target.context_length,
        "template": dict(target.template),
        "bos_token_id": getattr(config, "bos_token_id", None),
        "eos_token_id": getattr(config, "eos_token_id", None),
        "pad_token_id": getattr(config, "pad_token_id", None),
        "config": {key: value for key, value in whole.items() if key != "_name_or_path"},
        "trust_remote_code": target.trust_remote_code,
        **({"adapter": absolute(target.merged_adapter)} if target.merged_adapter else {}),
        **({"gguf_file": target.gguf_file} if target.gguf_file else {}),
        **({} if target.fix_mistral_regex is None else {"fix_mistral_regex": target.fix_mistral_regex}),
    }


def save_head(
    head: Any,
    folder: str | Path,
    *,
    target: dict[str, object],
    provenance: Mapping[str, object] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a head into `folder`, replacing what is there. `target` is the `target_record` of its target. `dtype`: of
    the weights in the file, by default that of the head's own. Modules of a checkpoint keep the checkpoint's dtypes.

    Heads are shared with others, so the provenance is saved without the command and with names instead of paths. The
    target's path is kept, because the head finds its target with it. If `folder` is a symbolic link, the head is
    written to its destination.
    """
    folder, kind = Path(os.path.realpath(folder)), kind_of(head)
    form = HEADS[kind].format
    dtype = dtype or next(head.parameters()).dtype
    weights = {}
    for name, value in head.to_checkpoint().items():
        rounded = value.to(dtype) if value.is_floating_point() and name not in head.stored else value
        weights[name] = rounded.detach().cpu().contiguous().clone()
    try:
        with whole_folder(folder) as fresh:
            file = fresh / form.weights_file
            save_file(weights, file, metadata={"format": "pt"})
            file.chmod(0o644)  # safetensors makes it readable only by its owner
            record = {
                "format": FORMAT,
                "kind": kind,
                "config": with_names(head.config.model_dump()),
                "target": {key: value for key, value in target.items() if key not in NOT_SAVED},
                "provenance": with_names({key: value for key, value in (provenance or {}).items() if key != "command"}),
                "sha256": file_hash(file),
            }
            fields = form.engine_config(head.config, target, str(dtype).removeprefix("torch."))
            (fresh / CONFIG).write_text(json.dumps({**fields, "draftsmith": record}, indent=2) + "\n")
            if form.write_beside is not None:
                form.write_beside(fresh, target)
    except (OSError, SafetensorError) as error:
        if not is_full_disk(error):
            raise
        raise UserError(
            f"{folder}: no space left on the device for the head; free some and run the same command again"
        ) from error


def _head_here(path: Path) -> Path | None:
    def is_head(folder: Path) -> bool:
        return (folder / CONFIG).is_file() and any((folder / name).is_file() for name in WEIGHTS)

    return next((folder for folder in (path, path / "head") if is_head(folder)), None)


def weights_hash(path: str | Path) -> str | None:
    """Return the SHA-256 of a head's tensors; None if there is no head."""
    with suppress(OSError, ValueError):  # not a path
        if folder := _head_here(Path(path)):
            return file_hash(next(folder / name for name in WEIGHTS if (folder / name).is_file()))
    return None


def load_head(path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Any:
    """Load a head from its folder, from the folder of the run that trained it, or from the Hub. Loading is strict.

    Raises UserError if nothing is found, a file is damaged, or a tensor is missing, unknown or of another shape.
    """
    folder = find_head(path)
    while True:
        record = read_config(folder)
        try:
            return _load(folder, record).to(device=device, dtype=dtype).eval()
        except UserError:
            if read_config(folder) == record:  # else a save replaced the head between the two files
                raise


def _load(folder: Path, record: dict[str, Any]) -> Any:
    file = folder / HEADS[record["kind"]].format.weights_file
    try:
        weights = dequantized(load_file(file))
    except DAMAGE as error:
        raise UserError(f"{file}: truncated or damaged ({first_line(error)}); fetch or train it again") from error
    head = restore_head(record["kind"], record["config"], weights, file)
    check_unchanged(file, record)
    return head


def check_unchanged(file: Path, record: dict[str, object]) -> None:
    """Raise UserError unless the tensors are those for which config.json was written."""
    if file_hash(file) != record.get("sha256"):
        raise UserError(
            f"{file}: changed since it was saved: not the file that {CONFIG} was written for; fetch it again"
        )


def restore_head(kind: str, config: dict[str, object], weights: dict[str, Tensor], source: str | Path) -> Any:
    """Return the head of a kind with this config and these tensors. Raises UserError, which names their source, if they
    describe no head."""
    try:
        head = HEADS[kind].head.from_checkpoint(config, weights)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except Exception as error:  # a draft model's class is transformers', and may raise anything
        raise UserError(
            f"{source}: damaged: {CONFIG} describes no head ({first_line(error)}); fetch or train it again"
        ) from error
    for name in sorted(weights):
        if not weights[name].isfinite().all():
            raise UserError(f"{source}: tensor {name} holds values that are not finite; fetch or train it again")
    return head


def find_head(path: str | Path) -> Path:
    """Return the folder of a head's two files: `path` itself, its head/ folder, or a snapshot from the Hub."""
    try:
        here = _head_here(Path(path))
        if here is not None:
            return here
        is_here = Path(path).exists()
    except (OSError, ValueError) as error:  # a name too long, a null byte
        raise UserError(f"{path}: no path that can be read ({first_line(error)}); name a head's folder") from None
    repo, revision = repo_and_revision(str(path))
    if is_here or repo.startswith((".", "/")) or repo.count("/") != 1:
        if (Path(path) / "recipe.yaml").is_file():
            raise UserError(
                f"{path}: this run has no head yet; the first is saved when tau is first measured (train.eval_points)"
            )
        kind, colon, number = str(path).partition(":")
        if colon and (near := get_close_matches(kind, UNTRAINED, 1)):
            raise UserError(f"{path}: no head of that name; did you mean {near[0]}:{number}?")
        raise UserError(
            f"{path}: no head there; expected a folder with {CONFIG} and {' or '.join(WEIGHTS)}, a run's folder, or a "
            "Hub id"
        )
    try:
        folder = Path(str(cached_file(repo, CONFIG, revision=revision))).parent
        cached_file(repo, HEADS[read_config(folder)["kind"]].format.weights_file, revision=revision)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: neither a folder here nor a head on the Hub ({first_line(error)}); "
            "check the name, and the network"
        ) from error
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Return draftsmith's section of a head's config.json."""
    file = folder / CONFIG
    try:
        record: dict[str, Any] = json.loads(file.read_text()).get("draftsmith", {})
    except (ValueError, AttributeError, OSError) as error:
        raise UserError(f"{file}: not a JSON object ({first_line(error)}); fetch or train the head again") from error
    if not isinstance(record, dict) or str(record.get("kind")) not in HEADS:
        raise UserError(f"{file}: no head of a known kind ({', '.join(HEADS)}); was it made by draftsmith?")
    if record.get("format") != FORMAT:
        raise UserError(
            f"{file}: format {record.get('format')!r}, this version reads {FORMAT}; use the one that wrote it"
        )
    for part in ("config", "target"):
        if not isinstance(record.get(part), dict):
            raise UserError(f"{file}: draftsmith.{part}: expected a JSON object; fetch or train the head again")
    return record


def trained_depth(record: dict[str, Any]) -> int | None:
    """Return how many tokens a round a head was trained to draft; None for a draft model, which has no such number."""
    rows: int | None = record["config"].get("block_size")
    depth: int | None = record["config"].get("depth")
    return depth if rows is None else rows - int(HEADS[record["kind"]].head.Config.spare_rows)


def check_loaders(path: str | Path, setting: Setting | None = None) -> list[Verdict]:
    """Return what engines and other readers make of a saved head, without loading it."""
    folder = find_head(path)
    record = read_config(folder)
    form = HEADS[record["kind"]].format
    check_unchanged(folder / form.weights_file, record)
    with safe_open(folder / form.weights_file, framework="pt") as opened:
        shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    return check_contents(
        json.loads((folder / CONFIG).read_text()),
        shapes,
        form,
        record["kind"],
        record["target"],
        setting,
        trained=trained_depth(record),
    )


def check_unsaved(head: DraftHead, target: FrozenTarget) -> list[Verdict]:
    """Return what engines and other readers would make of a head, if it were saved. Its tensors need no values."""
    kind, record = kind_of(head), target_record(target)
    form = HEADS[kind].format
    config = form.engine_config(head.config, record, str(target.dtype).removeprefix("torch."))
    config |= {"draftsmith": {"config": head.config.model_dump()}}
    shapes = {name: tuple(tensor.shape) for name, tensor in head.to_checkpoint().items()}
    return check_contents(config, shapes, form, kind, record)


def check_fits(path: str | Path, target: FrozenTarget) -> None:
    """Raise UserError for a head that was trained for a target of another class, width, vocabulary or depth. Say if the
    target is another copy than that of the training, with other weights, another config or another tokenizer."""
    trained_for = read_config(find_head(path))["target"]
    known = trained_for["name"]  # None in a published head whose target is a folder
    where = "a target" if known is None else f"target {known}"
    for name, ours, theirs in (
        ("architecture", trained_for.get("architecture", target.architecture), target.architecture),
        ("hidden size", trained_for["hidden_size"], target.hidden_size),
        ("vocabulary", trained_for["vocab_size"], target.vocab_size),
        ("number of layers", trained_for["num_layers"], target.num_layers),
    ):
        if ours != theirs:
            has = f"trained for {where} with {name} {ours}, but {target.name} has {theirs}"
            raise UserError(f"{path}: {has}; measure it on its own target")
    if changed := changes(trained_for, target.identity):
        # Every dtype has the same fingerprint except float16, whose range cuts off small weights.
        cuts = ", some cut off by float16" if target.dtype == torch.float16 else ""
        warn_once(
            f"{path}: {target.name} is another copy of the target that it was trained for "
            f"({'; '.join(changed)}{cuts}): what is measured is of this copy"
        )
