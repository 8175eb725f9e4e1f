"""Copies of a target's checkpoint with the modules of an MTP head in place of its own.

The modules' tensors have the names, shapes and dtypes of the checkpoint's own, and replace them in its files. A
checkpoint without modules, of a family that has them, gets them in an additional file, and its index and config.json
are updated.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.core.errors import UserError, first_line
from heads.core.files import check_empty, whole_folder
from heads.formats.engine_folder import named_class
from heads.formats.mtp import MTP, MtpLoader, compare_tensors, module_shapes
from heads.methods.mtp import Mtp
from heads.methods.mtp_names import LAYOUTS, SHARED, find_modules, module_names
from heads.published import is_published, open_any
from heads.saved import CONFIG, find_head, read_config
from heads.targets.hub import INDEX, is_here, read_tensors, tensor_files
from heads.targets.load import load_target

ADDED = "model-mtp.safetensors"
"""Additional file for modules that the checkpoint did not have."""
ONLY = "model-00001-of-00001.safetensors"
"""Name of a checkpoint's only file after an index is added."""


def stitch(head: str, target: str, out: Path, *, trust_remote_code: bool = False) -> list[str]:
    """Write a copy of the checkpoint in the folder `target` with the modules of the head at a path or Hub id. Return
    the names of the files that differ.

    Raises UserError if the head is for another target or does not fit, if `out` is not empty, or if files are damaged.
    `out` is written completely or not at all.
    """
    out = Path(os.path.realpath(out))
    folder = Path(target)
    check_empty(out)
    if not is_here(target) or not folder.is_dir():
        raise UserError(f"{folder}: no such folder; fetch the target's checkpoint and name its folder")
    other = UserError(f"{head}: only modules of multi-token prediction are part of a checkpoint; name an mtp head")
    if not is_published(head) and read_config(find_head(head))["kind"] != "mtp":  # before the target is loaded
        raise other
    model = load_target(target, trust_remote_code=trust_remote_code)
    source = open_any(head, model)
    if not isinstance(source, Mtp):
        raise other
    files = tensor_files(target)
    modules = fitting_modules(source, head, folder, files, model.config)
    change = _replace if modules.keys() <= files.keys() else _add
    hidden = shutil.ignore_patterns(".git", ".cache")  # of the tools that downloaded the checkpoint
    try:
        with whole_folder(out) as fresh:
            shutil.copytree(folder, fresh, ignore=hidden, copy_function=shutil.copyfile, dirs_exist_ok=True)
            return change(files, modules, fresh)
    except OSError as error:
        raise UserError(
            f"{out}: could not be written ({first_line(error)}); free space or name another place"
        ) from error


def fitting_modules(head: Mtp, path: str, folder: Path, files: Mapping[str, Path], config: Any) -> dict[str, Tensor]:
    """Return the head's tensors under their names and in their dtypes in the checkpoint. Raises UserError unless they
    match the modules that it has, or would have with its Hugging Face `config`."""
    layers: int = config.num_hidden_layers
    layout, count = find_modules(files, layers)
    if count:
        names = [name for name in module_names(files, LAYOUTS[layout], count, layers) if not name.endswith(SHARED)]
        stored = read_tensors(files, names)
        for name, value in stored.items():
            if not value.is_floating_point() or value.itemsize < 2:
                raise UserError(f"{folder}: {name} is {value.dtype}; expected modules that are not quantised")
        head.stored = {name: value.dtype for name, value in stored.items()}
        expected = {name: tuple(value.shape) for name, value in stored.items()}
    else:
        layout = _loader_of(folder).layout
        count = head.num_modules
        expected = module_shapes(config, LAYOUTS[layout], count, head.stored)
        if expected.keys() & files.keys():
            raise UserError(f"{folder}: holds a part of a module of {layout}; fetch the checkpoint again")
    if (head.config.layout, head.num_modules) != (layout, count):
        raise UserError(
            f"{path}: holds {head.num_modules} modules of the layout {head.config.layout}, the target in {folder} has "
            f"{count} of {layout}; train a head with head.native"
        )
    modules = {name: value.detach().cpu().contiguous() for name, value in head.to_checkpoint().items()}
    if errors := compare_tensors(expected, {name: tuple(value.shape) for name, value in modules.items()}):
        raise UserError(f"{path}: does not fit into {folder}: {errors[0]}; train a head with head.native")
    return modules


def _loader_of(folder: Path) -> MtpLoader:
    """Return how engines load modules of the target's class. Raises UserError if they load none."""
    name = str(named_class(json.loads((folder / CONFIG).read_text(encoding="utf-8"))))
    if name not in MTP:
        raise UserError(
            f"{folder}: has no module of multi-token prediction, and no engine loads one of a {name}; serve the head "
            "from its own folder, or train an EAGLE-3 head"
        )
    return MTP[name]


def _replace(files: Mapping[str, Path], modules: Mapping[str, Tensor], fresh: Path) -> list[str]:
    """Write the copies of the files that hold modules anew, with `modules` in place of their own."""
    changed = {files[name] for name in modules}
    for file in changed:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        own = {name: value for name, value in modules.items() if files[name] == file}
        save_file(load_file(file) | own, fresh / file.name, metadata=metadata)
        (fresh / file.name).chmod(0o644)  # safetensors makes it readable only by its owner
    return sorted(file.name for file in changed)


def _add(files: Mapping[str, Path], modules: Mapping[str, Tensor], fresh: Path) -> list[str]:
    """Write the modules to an additional file, add it to the index, and write their number to config.json."""
    save_file(dict(modules), fresh / ADDED, metadata={"format": "pt"})
    (fresh / ADDED).chmod(0o644)
    index: dict[str, Any] = {"metadata": {}, "weight_map": dict.fromkeys(files, ONLY)}
    if (fresh / INDEX).is_file():
        index = json.loads((fresh / INDEX).read_text(encoding="utf-8"))
    else:
        (fresh / next(iter(files.values())).name).rename(fresh / ONLY)
    metadata = index.setdefault("metadata", {})
    metadata.pop("total_parameters", None)  # not true any more
    metadata["total_size"] = sum(value.nbytes for value in (*read_tensors(files, files).values(), *modules.values()))
    index["weight_map"] |= dict.fromkeys(modules, ADDED)
    (fresh / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    config = json.loads((fresh / CONFIG).read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    _, text[_loader_of(fresh).count] = find_modules(modules, text["num_hidden_layers"])
    (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return [ADDED, INDEX, CONFIG]
