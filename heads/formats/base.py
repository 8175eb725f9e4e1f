"""Format of the folder that heads of one kind are saved in, and what engines and the papers' repositories load from it.

The expectations of each reader are data, taken from the source code of the versions named here. No reader reliably
reports a mismatch: SGLang skips tensors with unknown names, vLLM leaves absent tensors uninitialised, and the EAGLE
repository does both. Expected shapes are functions of config.json, so a folder can be checked without loading it
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
    from heads.target.model import FrozenTarget

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"
ENGINES = (VLLM, SGLANG)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Floating-point dtypes that weights may have."""
VOCABULARY = ("d2t", "t2d", "token_map")
"""Names of the tensors of a draft vocabulary."""

Shapes = dict[str, tuple[int, ...]]

Command = Callable[[str, str, int, Mapping[str, Any]], str]
"""(target with its options, head, draft tokens per round, the head's config.json) -> command that serves them."""


@dataclass(frozen=True)
class Folder:
    """A folder to compare with what readers expect."""

    config: Mapping[str, Any]
    """Contents of config.json."""
    shapes: Shapes
    target: Mapping[str, Any]
    """The head's record of its target."""


@dataclass(frozen=True)
class Reading:
    """A head that another project saved, converted to draftsmith's config and tensors."""

    form: str
    """Form in which the head was saved."""
    config: dict[str, Any]
    """Config of the head, without the fields that have a default."""
    weights: dict[str, Tensor]
    """Tensors as the head's `to_checkpoint` returns them."""
    differs: tuple[str, ...] = ()
    """Ways in which an engine would load a different head than its trainer meant."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """Format of the folder that heads of one kind are saved in."""

    weights_file: str = "model.safetensors"
    """File in which engines look for the tensors."""
    engine_config: Callable[[Any, dict[str, Any], str], dict[str, Any]]
    """(the head's config, `heads.checkpoint.target_record` with `config`, dtype) -> config.json for engines."""
    readers: Mapping[str, Command]
    """Command for each reader, by the reader's name."""
    check: Callable[[Folder, str], tuple[str | None, list[str]]]
    """(folder, reader) -> the reason why the reader does not support such a head, or None, and the faults of the
    folder."""
    write_beside: Callable[[Path, dict[str, Any]], None] | None = None
    """Write the other files that the folder needs, from the record of the target."""
    read: "Callable[[Source, FrozenTarget], Reading | None]"
    """Read a head of the target in other projects' forms. Returns None for a folder without a head of this kind. Raises
    UserError for a head of another target, or of a kind that cannot be run. Names and shapes of the tensors are checked
    later."""
    converters: Callable[[str, str, Mapping[str, Any]], list[str]] = lambda head, target, config: []
    """(head, target, the head's config) -> lines on how to convert the folder into other forms."""


def check_same(source: Source, target: "FrozenTarget", **found: Any) -> None:
    """Raise UserError for a head of another target. `found` has the sizes in the head's files by name, None for unknown
    ones."""
    ours = {"width": target.hidden_size, "vocabulary": target.vocab_size, "number of layers": target.num_layers}
    for name, value in found.items():
        name = name.replace("_", " ")
        if value is not None and value != ours[name]:
            raise UserError(
                f"{source.path}: made for a target with {name} {value}, but {target.name} has {ours[name]}; measure it "
                "on its own target"
            )


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the tensors found have the expected names, shapes and dtypes. Floating-point tensors may
    have any width of at least 16 bits."""
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
    """Return a function that makes vLLM's command."""

    def run(target: str, head: str, steps: int, config: Mapping[str, Any]) -> str:
        settings = json.dumps({"method": method, "model": head, "num_speculative_tokens": steps})
        return f"vllm serve {target} --speculative-config {shlex.quote(settings)}"

    return run


def sglang(algorithm: str, *, block: bool = False) -> Command:
    """Return a function that makes SGLang's command, for chains as in vLLM. `block`: the method drafts a block, and the
    command has no options of a chain."""

    def run(target: str, head: str, steps: int, config: Mapping[str, Any]) -> str:
        chain = "" if block else f"--speculative-num-steps {steps} --speculative-eagle-topk 1 "
        window = config.get("sliding_window") if algorithm == "EAGLE3" else None
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
            f"--speculative-draft-model-path {shlex.quote(head)} {chain}--speculative-num-draft-tokens {steps + 1}"
            + (f" {window_option(window)}" if window else "")
        )

    return run


def window_option(window: int) -> str:
    """Return the option of SGLang 0.5.23 for an EAGLE-3 head with a sliding window, which it does not read from
    config.json. The option does not count the token's own position."""
    return f"--speculative-draft-window-size {window - 1}"


DECODER_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
"""Sizes of a decoder's layers in config.json."""


def decoder_config(config: Any, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the fields of config.json for a head's decoder layers and its target's special tokens."""
    own = {name: getattr(config, name) for name in (*DECODER_SIZES, "rms_norm_eps", "rope_theta")}
    tokens = {name: target.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**own, "max_position_embeddings": config.max_position_embeddings, **tokens, "torch_dtype": dtype}


def attention(prefix: str, c: Mapping[str, Any], width: int) -> Shapes:
    """Return the shapes of an attention's projections for inputs of `width`, from the sizes in config.json."""
    queries, keys = (c[name] * c["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return {
        f"{prefix}.q_proj.weight": (queries, width),
        f"{prefix}.k_proj.weight": (keys, width),
        f"{prefix}.v_proj.weight": (keys, width),
        f"{prefix}.o_proj.weight": (c["hidden_size"], queries),
    }


def gated_mlp(prefix: str, D: int, width: int) -> Shapes:
    """Return the shapes of a gated MLP, or of an expert."""
    return {
        f"{prefix}.gate_proj.weight": (width, D),
        f"{prefix}.up_proj.weight": (width, D),
        f"{prefix}.down_proj.weight": (D, width),
    }


def named_class(config: Mapping[str, Any]) -> str | None:
    """Return the first class that config.json names, or None."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def fields(config: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the faults of config.json's fields."""
    return [
        f"config.json: {name}: expected {value!r}, found {config.get(name)!r}"
        for name, value in expected.items()
        if config.get(name) != value
    ]


def sizes(config: Mapping[str, Any], names: Sequence[str], where: str = "") -> list[str]:
    """Return the faults of the fields that shapes are computed from. `where`: prefix of their names in the messages."""
    bad = [name for name in names if type(config.get(name)) is not int or config[name] < 1]
    return [f"config.json: {where}{name}: expected a positive number, found {config.get(name)!r}" for name in bad]


def tensors(expected: Shapes, found: Shapes) -> list[str]:
    """Return the faults of the tensors' names and shapes."""
    faults = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in expected and name in VOCABULARY:
            faults.append(f"{name}: expected none, no draft vocabulary is read here")
        elif name not in found:
            faults.append(f"{name}: expected {expected[name]}, found none: it would be whatever memory holds")
        elif expected.get(name) != found[name]:
            faults.append(f"{name}: expected {expected.get(name, 'no such tensor')}, found {found[name]}")
    return faults
