"""Conversion of targets and heads into GGUF files by llama.cpp's converter (of build 11434), and their check."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from eval.servers.engine_process import need_python, run_inside
from heads.core.contract import DraftHead
from heads.core.engines import LLAMACPP
from heads.core.errors import UserError
from heads.core.serve_commands import Setting
from heads.registry import HEADS

Q8_0 = "q8_0"
"""Type of files that small machines read: 8 bits, and a scale of 16 bits for every 32 values."""


def spec_type(kind: str) -> str:
    """Return what the printed command names a kind's method in --spec-type, after `draft-`."""
    make = HEADS[kind].format.readers.get(LLAMACPP)
    if make is None:
        raise UserError(f"{LLAMACPP} has no method for heads of kind {kind}; take another head")
    (name,) = re.findall(r"--spec-type draft-(\w+)", make(Setting(), {}))
    return str(name)


def converter_of(python: Path) -> Path:
    """Return the path of the converter, which is part of llama.cpp's sources."""
    note = python.parents[1] / "converter"
    script = Path(note.read_text().strip()) if note.is_file() else None
    if script is None or not script.is_file():
        raise UserError(f"{note}: names no converter of llama.cpp; run scripts/make_engine.sh llama.cpp again")
    return script


def convert(folder: str, file: Path, *, target: str | None = None, dtype: str = "f32", log: Path) -> bool:
    """Write a target's folder, or that of a head of `target`, as a GGUF file. Return False if llama.cpp does not know
    the tokenizer: the file then serves token ids only. UserError, with the converter's words, if it refuses."""
    python = need_python("llama.cpp")
    options = [folder, "--outtype", dtype, "--outfile", str(file)]
    options += ["--target-model-dir", target] if target else []
    said = run_inside(
        python,
        "llamacpp_convert.py",
        str(converter_of(python)),
        *options,
        what=f"{folder}: llama.cpp's converter refuses it",
        log=log,
    )
    return "unknown tokenizer" not in said


def check_gguf(file: Path, head: DraftHead, kind: str) -> None:
    """Raise UserError unless a GGUF file holds a head: its layers of the target, its options, and every value, in
    float32 or as llama.cpp rounds it. Of a draft model, whose values the converter may change, only their number is
    compared."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError("a GGUF file is read back with gguf; pip install gguf") from None
    reader = GGUFReader(file)
    tensors = [tensor for tensor in reader.tensors if not tensor.name.startswith("rope_")]
    ours = {name: value.clone() for name, value in head.to_checkpoint().items() if name != "t2d"}
    if kind == "draft":
        own = sum(value.numel() for value in ours.values())
        number = sum(int(tensor.n_elements) for tensor in tensors)
        if own != number:
            raise UserError(f"{file.name}: the converter wrote {number:,} of {own:,} values; serve the head elsewhere")
        return
    config = head.config
    named = {"block_size": "block_size", "causal": "attention.causal", "selector_top_k": "selector_top_k"}
    named |= {name: name for name in ("norm_before_fc", "norm_before_residual", "selector_rank", "conv_kernel_size")}
    prefix = "eagle3" if kind == "eagle3" else "dflash"
    expected = {f"{prefix}.{name}": getattr(config, own) for own, name in named.items() if hasattr(config, own)}
    expected[f"{prefix}.target_layers"] = list(head.aux_layer_ids)
    for name, value in expected.items():
        found = reader.fields[name].contents() if name in reader.fields else None
        if found != value:
            raise UserError(f"{file.name}: {name}: the converter wrote {found}, the head has {value}")
    if "d2t" in ours:  # which llama.cpp has as ids
        ours["d2t"] += torch.arange(len(ours["d2t"]))
    types = {tensor.tensor_type for tensor in tensors}
    digests = {name: {digest(form) for form in forms(value.cpu(), types)} for name, value in ours.items()}
    theirs = {tensor.name: digest(plain(tensor.data, tensor.tensor_type)) for tensor in tensors}
    lost = [name for name, values in digests.items() if values.isdisjoint(theirs.values())]
    added = [name for name, value in theirs.items() if not any(value in values for values in digests.values())]
    if lost or added:
        changed = ", ".join(lost or added)
        raise UserError(f"{file.name}: the converter dropped or changed {changed}; serve the head elsewhere")


def forms(value: Tensor, types: Iterable[Any]) -> Iterator[Any]:
    """Yield an array's values, and what each type of a GGUF file makes of them."""
    from gguf import QuantError, quantize

    if not value.is_floating_point():
        yield value.numpy()
        return
    array = value.float().numpy()
    for kind in types:
        with suppress(QuantError, NotImplementedError):  # of rows that are no whole number of blocks, or of integers
            yield plain(quantize(array, kind), kind)


def plain(values: Any, kind: Any) -> object:
    """Return the values of a tensor of a GGUF file as numbers."""
    from gguf import dequantize

    return values if kind.name in ("I32", "I64") else dequantize(values, kind)


def digest(values: Any) -> str:
    """Return a hash of an array's values in any order: the converter reorders the rows of queries and keys."""
    return hashlib.sha256(numpy.sort(values.ravel() + 0).tobytes()).hexdigest()
