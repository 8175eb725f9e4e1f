"""A format: the folder that heads of one kind are saved as, and what engines and the papers' repositories load of it.

What each reader takes is data, read in the source of the versions named here. None of them can be trusted to notice
what does not fit: SGLang skips tensors whose names it does not know, vLLM leaves absent ones as they are in memory, the
EAGLE repository does both. Shapes are functions of config.json, so that a folder can be compared without loading it
(`heads.formats.contract`).

Letters: D hidden, V vocabulary, Vd draft vocabulary.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heads.errors import UserError
from heads.formats.source import Source

if TYPE_CHECKING:
    from heads.target.frozen import FrozenTarget

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"
ENGINES = (VLLM, SGLANG)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Floating-point numbers that weights may be held in."""
VOCABULARY = ("d2t", "t2d", "token_map")
"""Tensors of a draft vocabulary."""

Shapes = dict[str, tuple[int, ...]]

Command = Callable[[str, str, int], str]
"""The target with its options, the head, and the tokens drafted a round -> what serves them."""


@dataclass(frozen=True)
class Folder:
    """A folder to compare with the readers."""

    config: Mapping[str, Any]
    """config.json."""
    shapes: Shapes
    target: Mapping[str, Any]
    """The head's record of its target."""


@dataclass(frozen=True)
class Reading:
    """A head that another project saved, in the terms of ours."""

    form: str
    """The form that it was saved in."""
    config: dict[str, Any]
    """The head's config, without what has a default."""
    weights: dict[str, Tensor]
    """Tensors as `to_checkpoint` of the head gives them."""
    differs: tuple[str, ...] = ()
    """Ways in which an engine would read another head than its trainer meant."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """The folder that heads of one kind are saved as."""

    weights_file: str = "model.safetensors"
    """The file that engines look for the tensors in."""
    engine_config: Callable[[Any, dict[str, Any], str], dict[str, Any]]
    """(the head's config, `heads.checkpoint.target_record` with `config`, dtype) -> config.json as engines read it."""
    readers: Mapping[str, Command]
    """Who loads it -> the command."""
    check: Callable[[Folder, str], tuple[str | None, list[str]]]
    """A folder and one of the readers -> why the reader takes no such head, and what it would refuse or misread."""
    write_beside: Callable[[Path, dict[str, Any]], None] | None = None
    """Write the files that the folder needs beside these two, by the record of the target."""
    read: "Callable[[Source, FrozenTarget], Reading | None]"
    """Read the head of a target in other projects' forms; None for a folder that holds no head of this kind. UserError
    for a head of another target, or of a kind that cannot be run. Names and shapes of the tensors are checked later."""
    converters: Callable[[str, str, Mapping[str, Any]], list[str]] = lambda head, target, config: []
    """(the head, the target, the head's config) -> lines on what brings the folder into other forms."""


def check_same(source: Source, target: "FrozenTarget", **found: Any) -> None:
    """Refuse a head of another target: each size by its name, where the head's files tell it."""
    ours = {"width": target.hidden_size, "vocabulary": target.vocab_size, "number of layers": target.num_layers}
    for name, value in found.items():
        name = name.replace("_", " ")
        if value is not None and value != ours[name]:
            raise UserError(
                f"{source.path}: made for a target with {name} {value}, but {target.name} has {ours[name]}; measure it "
                "on its own target"
            )


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """UserError unless the tensors found have the expected names, shapes and kinds of number; floating-point tensors
    may come in any width of at least 16 bits."""
    ours, theirs = (
        {
            name: f"{tuple(value.shape)} {'floating-point' if value.dtype in FLOATS else value.dtype}"
            for name, value in tensors.items()
        }
        for tensors in (expected, found)
    )
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"tensor {name}: by config.json beside it expected {ours.get(name, 'no such tensor')}, "
                f"found {theirs.get(name, 'none')}"
            )


def vllm(method: str) -> Command:
    """Return the command of vLLM."""

    def run(target: str, head: str, steps: int) -> str:
        settings = json.dumps({"method": method, "model": head, "num_speculative_tokens": steps})
        return f"vllm serve {target} --speculative-config {shlex.quote(settings)}"

    return run


def sglang(algorithm: str, *, block: bool = False) -> Command:
    """Return the command of SGLang: chains, as vLLM drafts them. `block`: it asks for the tokens of a whole block."""

    def run(target: str, head: str, steps: int) -> str:
        chain = "" if block else f"--speculative-num-steps {steps} --speculative-eagle-topk 1 "
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
            f"--speculative-draft-model-path {shlex.quote(head)} {chain}--speculative-num-draft-tokens {steps + 1}"
        )

    return run


DECODER_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
"""The sizes of a decoder's layers in config.json."""


def decoder_config(config: Any, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The fields of config.json for a head's decoder layers and the special tokens of its target."""
    own = {name: getattr(config, name) for name in (*DECODER_SIZES, "rms_norm_eps", "rope_theta")}
    tokens = {name: target.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**own, "max_position_embeddings": config.max_position_embeddings, **tokens, "torch_dtype": dtype}


def attention(prefix: str, c: Mapping[str, Any], width: int) -> Shapes:
    """The projections of an attention whose inputs are of `width`, by the sizes in config.json."""
    queries, keys = (c[name] * c["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return {
        f"{prefix}.q_proj.weight": (queries, width),
        f"{prefix}.k_proj.weight": (keys, width),
        f"{prefix}.v_proj.weight": (keys, width),
        f"{prefix}.o_proj.weight": (c["hidden_size"], queries),
    }


def gated_mlp(prefix: str, D: int, width: int) -> Shapes:
    """A gated MLP, an expert's too."""
    return {
        f"{prefix}.gate_proj.weight": (width, D),
        f"{prefix}.up_proj.weight": (width, D),
        f"{prefix}.down_proj.weight": (D, width),
    }


def named_class(config: Mapping[str, Any]) -> str | None:
    """The first class that config.json names."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def fields(config: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Faults of config.json's fields."""
    return [
        f"config.json: {name}: expected {value!r}, found {config.get(name)!r}"
        for name, value in expected.items()
        if config.get(name) != value
    ]


def sizes(config: Mapping[str, Any], names: Sequence[str], where: str = "") -> list[str]:
    """Faults of the fields that shapes are worked out from; `where` they stand, as a prefix of their names."""
    bad = [name for name in names if type(config.get(name)) is not int or config[name] < 1]
    return [f"config.json: {where}{name}: expected a positive number, found {config.get(name)!r}" for name in bad]


def tensors(expected: Shapes, found: Shapes) -> list[str]:
    """Faults of the tensors' names and shapes."""
    faults = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in expected and name in VOCABULARY:
            faults.append(f"{name}: expected none, no draft vocabulary is read here")
        elif name not in found:
            faults.append(f"{name}: expected {expected[name]}, found none: it would be whatever memory holds")
        elif expected.get(name) != found[name]:
            faults.append(f"{name}: expected {expected.get(name, 'no such tensor')}, found {found[name]}")
    return faults
