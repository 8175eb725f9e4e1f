"""A copy of a saved head with its projections in 8 bits (`heads.formats.quantized`)."""

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from heads.core.errors import UserError
from heads.core.files import check_empty, file_hash, whole_folder
from heads.formats.quantized import quantization_config, quantized
from heads.registry import HEADS
from heads.saved import CONFIG, find_head, load_head, read_config

MEASURED = ("acceptance.json", "results.json", "README.md")
"""Names of files beside a head that say what was measured of it, and so not of the copy."""


def quantize_head(path: str, out: Path, dtype: str) -> tuple[int, int]:
    """Write the head at `path` to the folder `out`, with projections in `dtype`, fp8 or int8. Return the bytes of the
    tensors' file before and after. Raises UserError for a head that engines do not read so, or if `out` is not
    empty."""
    out = Path(os.path.realpath(out))
    folder = find_head(path)
    check_empty(out)
    kind = read_config(folder)["kind"]
    form = HEADS[kind].format
    if not form.quantizes:
        raise UserError(f"{path}: engines read no head of kind {kind} in 8 bits; name an EAGLE-3 head or a draft model")
    load_head(folder)  # a damaged one is refused
    file = folder / form.weights_file
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise UserError(f"{path}: is quantised already; give the head that it was made from")
    with whole_folder(out) as fresh:
        shutil.copytree(folder, fresh, ignore=shutil.ignore_patterns(*MEASURED), dirs_exist_ok=True)
        copy = fresh / form.weights_file
        save_file(quantized(load_file(file), dtype), copy, metadata={"format": "pt"})
        copy.chmod(0o644)
        config["quantization_config"] = quantization_config(dtype)
        config["draftsmith"]["sha256"] = file_hash(copy)
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        return file.stat().st_size, copy.stat().st_size
