"""Copies of a target's checkpoint with the modules of an MTP head in place of its own.

The modules' tensors have the names, shapes and dtypes of the checkpoint's own. So its files are copied, and only the
bytes of these tensors are overwritten. A checkpoint without modules, of a family that has them, gets them in an
additional file, and its index and config.json are updated.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.checkpoint import CONFIG
from heads.errors import UserError, first_line
from heads.files import whole_folder
from heads.formats.base import named_class, tensors
from heads.formats.mtp import LAYOUTS, MTP, SHARED, MtpLoader, find_modules, module_names, module_shapes
from heads.formats.source import DAMAGE, INDEX, tensor_files
from heads.mtp import Mtp
from heads.published import open_any
from heads.target.hub import is_here
from heads.target.load import load_target

STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that modules are stored in, by their names in safetensors files."""
ADDED = "model-mtp.safetensors"
"""Additional file for modules that the checkpoint did not have."""
ONLY = "model-00001-of-00001.safetensors"
"""Name of a checkpoint's only file after an index is added."""
NOT_COPIED = (".git", ".cache")
"""Folders of the tools that downloaded the checkpoint."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    size: int
    """Number of bytes."""


@dataclass(frozen=True)
class Checkpoint:
    """Files of a target on disk."""

    folder: Path
    config: dict[str, Any]
    layers: int
    """Number of decoder layers of the target."""
    entries: Mapping[str, Entry]
    index: dict[str, Any] | None
    """Metadata, and the file of each tensor; None for a checkpoint with one file."""


def stitch(head: str, target: str, out: Path, *, trust_remote_code: bool = False) -> list[str]:
    """Write a copy of the checkpoint in the folder `target` with the modules of the head at a path or Hub id. Return
    the names of the files that differ.

    Raises UserError if the head is for another target or does not fit, if `out` is not empty, or if files are damaged.
    `out` is written completely or not at all.
    """
    out = Path(os.path.realpath(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: there is something already; name a new or an empty folder")
    checkpoint = open_checkpoint(Path(target))
    model = load_target(target, trust_remote_code=trust_remote_code)
    found = open_any(head, model)
    if not isinstance(found, Mtp):
        raise UserError(f"{head}: only modules of multi-token prediction are part of a checkpoint; name an mtp head")
    modules = fitting_modules(found, head, checkpoint, model.config)
    del model
    return write_stitched(checkpoint, modules, out)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read config.json, the index and the headers of the tensors' files. Raises UserError if they are damaged or
    disagree."""
    if not is_here(str(folder)) or not folder.is_dir():
        raise UserError(f"{folder}: no such folder; fetch the target's checkpoint and name its folder")
    files, index_file = tensor_files(str(folder)), folder / INDEX
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        index = json.loads(index_file.read_text(encoding="utf-8")) if index_file.is_file() else None
        layers = int(config.get("text_config", config)["num_hidden_layers"])
        index = index and {"metadata": {**index.get("metadata", {})}, "weight_map": index["weight_map"]}
    except (*DAMAGE, RecursionError) as error:
        raise UserError(f"{folder}: {CONFIG} or {INDEX} is damaged ({first_line(error)}); fetch it again") from error
    if index is not None and index["weight_map"] != {name: file.name for name, file in files.items()}:
        wrong = {name for name, file in files.items() if index["weight_map"].get(name) != file.name}
        name = min(wrong or index["weight_map"].keys() - files.keys())
        raise UserError(
            f"{index_file}: damaged: {name} is said to lie in {index['weight_map'].get(name)}, and lies in "
            f"{files[name].name if name in files else 'no file'}; fetch the checkpoint again"
        )
    entries: dict[str, Entry] = {}
    for file in sorted(set(files.values())):
        entries |= _entries(file)
    return Checkpoint(folder, config, layers, entries, index)


def _entries(file: Path) -> dict[str, Entry]:
    """Return the header of a safetensors file that is known to be complete."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {
        name: Entry(file, it["dtype"], tuple(it["shape"]), 8 + length + begin, end - begin)
        for name, it in header.items()
        for begin, end in [it["data_offsets"]]
    }


def fitting_modules(head: Mtp, path: str, checkpoint: Checkpoint, config: Any) -> dict[str, Tensor]:
    """Return the head's tensors under their names and in their dtypes in the checkpoint. Raises UserError unless they
    match the modules that it has, or would have with its Hugging Face `config`."""
    folder, layers = checkpoint.folder, checkpoint.layers
    layout, count = find_modules(checkpoint.entries, layers)
    if count:
        names = module_names(checkpoint.entries, LAYOUTS[layout], count, layers)
        own = {name: checkpoint.entries[name] for name in names if not name.endswith(SHARED)}
        for name, entry in own.items():
            if entry.dtype not in STORED:
                raise UserError(f"{folder}: {name} is stored as {entry.dtype}; expected modules that are not quantised")
        head.stored = {name: STORED[entry.dtype] for name, entry in own.items()}
        expected = {name: entry.shape for name, entry in own.items()}
    else:
        layout, count = loader_of(checkpoint).layout, head.num_modules
        expected = module_shapes(config, LAYOUTS[layout], count, head.stored)
        if expected.keys() & checkpoint.entries.keys():
            raise UserError(f"{folder}: holds a part of a module of {layout}; fetch the checkpoint again")
    if (head.config.layout, head.num_modules) != (layout, count):
        raise UserError(
            f"{path}: holds {head.num_modules} modules of the layout {head.config.layout}, the target in {folder} has "
            f"{count} of {layout}; train a head with head.native"
        )
    found = {name: value.detach().cpu() for name, value in head.to_checkpoint().items()}
    if faults := tensors(expected, {name: tuple(value.shape) for name, value in found.items()}):
        raise UserError(f"{path}: does not fit into {folder}: {faults[0]}; train a head with head.native")
    return found


def loader_of(checkpoint: Checkpoint) -> MtpLoader:
    """Return how engines load modules of the target's class. Raises UserError if they load none."""
    name = str(named_class(checkpoint.config))
    if name not in MTP:
        raise UserError(
            f"{checkpoint.folder}: has no module of multi-token prediction, and no engine loads one of a {name}; "
            "serve the head from its own folder, or train an EAGLE-3 head"
        )
    return MTP[name]


def write_stitched(checkpoint: Checkpoint, modules: Mapping[str, Tensor], out: Path) -> list[str]:
    """Copy the checkpoint into the folder `out` with `modules`, which fit it: each replaces the tensor of its name, or
    all are in an additional file. Return the names of the files that differ."""
    folder = checkpoint.folder
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [file for file in files if file.parts[0] not in NOT_COPIED]
    room = sum((folder / file).stat().st_size for file in files) + sum(value.nbytes for value in modules.values())
    parent = next(place for place in out.parents if place.exists())
    if (free := shutil.disk_usage(parent).free) < room:
        raise UserError(
            f"{out}: needs {room / 2**30:,.1f} GiB, {parent} has {free / 2**30:,.1f}; free some, or name another place"
        )
    change = _overwrite if modules.keys() <= checkpoint.entries.keys() else _add
    try:
        with whole_folder(out) as fresh:
            for file in files:
                (fresh / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / file, fresh / file)
            return change(checkpoint, modules, fresh)
    except OSError as error:
        raise UserError(
            f"{out}: could not be written ({first_line(error)}); free space or name another place"
        ) from error


def _overwrite(checkpoint: Checkpoint, modules: Mapping[str, Tensor], fresh: Path) -> list[str]:
    """Overwrite the modules' bytes in the copies of the files that hold them."""
    by_file: dict[str, list[str]] = {}
    for name in modules:
        by_file.setdefault(checkpoint.entries[name].file.name, []).append(name)
    for file, names in by_file.items():
        with (fresh / file).open("r+b") as opened:
            for name in names:
                data = modules[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
                assert len(data) == checkpoint.entries[name].size, name
                opened.seek(checkpoint.entries[name].start)
                opened.write(data)
    return sorted(by_file)


def _add(checkpoint: Checkpoint, modules: Mapping[str, Tensor], fresh: Path) -> list[str]:
    """Write the modules to an additional file, add it to the index, and write their number to config.json."""
    save_file({name: value.contiguous() for name, value in modules.items()}, fresh / ADDED, metadata={"format": "pt"})
    (fresh / ADDED).chmod(0o644)  # safetensors makes it readable only by its owner
    index = checkpoint.index
    if index is None:
        (only,) = {entry.file.name for entry in checkpoint.entries.values()}
        (fresh / only).rename(fresh / ONLY)
        index = {"metadata": {}, "weight_map": dict.fromkeys(checkpoint.entries, ONLY)}
    sizes = [entry.size for entry in checkpoint.entries.values()] + [value.nbytes for value in modules.values()]
    said = {key: value for key, value in index["metadata"].items() if key != "total_parameters"}  # no longer true
    whole = {
        "metadata": said | {"total_size": sum(sizes)},
        "weight_map": index["weight_map"] | dict.fromkeys(modules, ADDED),
    }
    (fresh / INDEX).write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")
    _, count = find_modules(modules, checkpoint.layers)
    config = json.loads((fresh / CONFIG).read_text(encoding="utf-8"))
    config.get("text_config", config)[loader_of(checkpoint).count] = count
    (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return [ADDED, INDEX, CONFIG]
