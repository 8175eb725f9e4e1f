"""The loader contract: a head's folder compared with what `heads.formats.loaders` says of each reader.

Only config.json and the names and shapes of the tensors are read. Every reader of a head's kind gets a verdict: the
command that serves the head, or why there is none. Two things are told apart: `lacks`, a reader that takes no such head
whatever its folder holds, and `faults`, a folder that a reader would refuse or, worse, load as another head.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from heads.errors import UserError, first_line
from heads.formats.loaders import (
    COMMANDS,
    EAGLE3,
    EAGLE3_FIELDS,
    EAGLE3_SIZES,
    ENGINES,
    MEDUSA,
    MEDUSA_FIELDS,
    MEDUSA_SIZES,
    MEDUSA_TARGETS,
    MTP,
    Shapes,
    eagle3_tensors,
    medusa_tensors,
)
from heads.formats.mtp import LAYOUTS, PARTS, count_modules
from heads.target.families import register_mimo

VOCABULARY = ("d2t", "t2d", "token_map")
"""Tensors of a draft vocabulary."""
PORTABLE = (
    "the portable form is an EAGLE-3 file, with eagle_config.use_aux_hidden_state: false where the head reads the last "
    "hidden state alone"
)
"""What both engines load for the most targets."""


@dataclass(frozen=True)
class Verdict:
    """What one reader makes of one folder."""

    reader: str
    command: str
    lacks: str | None
    """Why the reader takes no such head, whatever its folder holds."""
    faults: tuple[str, ...]
    """What of the folder it would refuse or misread."""

    @property
    def serves(self) -> bool:
        """Whether the command serves the head."""
        return self.lacks is None and not self.faults

    @property
    def reason(self) -> str:
        """Why it does not, in words that follow the reader's name."""
        if not self.faults:
            return str(self.lacks)
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"would misread it: {self.faults[0]}{more}"


@dataclass(frozen=True)
class Folder:
    """What is compared."""

    config: Mapping[str, Any]
    """config.json."""
    shapes: Shapes
    target: Mapping[str, Any]
    """The head's record of its target."""


def check_folder(
    folder: Path, kind: str, weights: str, target: Mapping[str, Any], *, name: str, base: str, steps: int
) -> list[Verdict]:
    """The verdicts on the folder of a head of some kind, the engines' first. UserError where it cannot be read.

    weights: its file of tensors; target: the head's record of its target. Commands call the head `name` and its target
    `base`, and draft `steps` tokens a round.
    """
    found = read_folder(folder / "config.json", folder / weights, target)
    base = shlex.quote(base) + (" --trust-remote-code" if "auto_map" in found.config else "")
    commands, verdicts = COMMANDS.get(kind, {}), []
    for reader in dict.fromkeys((*ENGINES, *commands)):
        if reader in commands:
            lacks, faults = CHECKS[kind](found, reader)
            verdicts.append(Verdict(reader, commands[reader](base, name, steps), lacks, tuple(faults)))
        else:
            verdicts.append(Verdict(reader, "", f"has no method for heads of kind {kind}", ()))
    return verdicts


def why_unfit(verdicts: Sequence[Verdict]) -> str | None:
    """Why a head is not fit for engines: none serves it, or one would misread it. None where it is fit."""
    engines = [verdict for verdict in verdicts if verdict.reader in ENGINES]
    served, misread = any(verdict.serves for verdict in engines), any(verdict.faults for verdict in engines)
    if served and not misread:
        return None
    why = "; ".join(f"{verdict.reader} {verdict.reason}" for verdict in engines if not verdict.serves)
    return why if misread else f"no engine serves it: {why}; {PORTABLE}"


def read_folder(config_file: Path, weights: Path, target: Mapping[str, Any]) -> Folder:
    """config.json and the shapes of the tensors."""
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{config_file}: damaged ({first_line(error)}); fetch or train the head again") from error
    try:
        with safe_open(weights, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError, LookupError) as error:
        raise UserError(f"{weights}: truncated or damaged ({first_line(error)}); fetch or train it again") from error
    if not isinstance(config, dict):
        raise UserError(f"{config_file}: not a JSON object; fetch or train the head again")
    return Folder(config, shapes, target)


def check_eagle3(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    """An EAGLE-3 head."""
    config, target, loader = folder.config, folder.target, EAGLE3[reader]
    name = str(target.get("architecture"))
    lacks = None if name in loader.targets else f"hands no residual streams of a {name} to a head"
    faults = fields(config, EAGLE3_FIELDS) + sizes(config, EAGLE3_SIZES)
    if not faults:
        faults += fields(config, {name: target[name] for name in ("hidden_size", "vocab_size")})
        faults += tensors(eagle3_tensors(config), folder.shapes)
        ignored = [name for name in ("fc_norm", "norm_output") if config.get(name) and name not in loader.options]
        faults += [f"config.json: {name}: is not read, so another head would run" for name in ignored]
        faults += layer_ids(config, target["num_layers"], reader)
    return lacks, faults


def layer_ids(config: Mapping[str, Any], layers: int, reader: str) -> list[str]:
    """Faults of the residual streams that a reader would capture."""
    loader, ours = EAGLE3[reader], config.get("eagle_aux_hidden_state_layer_ids")  # by the layer that each enters
    if not isinstance(ours, list) or not all(type(k) is int for k in ours):
        return [f"config.json: eagle_aux_hidden_state_layer_ids: expected numbers of layers, found {ours!r}"]
    read: Any = config
    for key in loader.ids:
        read = read.get(key) if isinstance(read, dict) else None
    default = [2, layers // 2, layers - 3]
    where, expected = ".".join(loader.ids), [k + loader.offset for k in ours]
    faults = []
    if not loader.ids and ours != default:
        faults.append(f"no layer ids are read: {default} would be captured in the place of {ours}")
    if loader.ids and read != expected:
        faults.append(f"config.json: {where}: expected {expected}, found {read!r}: other layers would be captured")
    if config["num_aux_hidden_states"] != len(ours) or sorted(set(ours)) != ours:
        faults.append(f"config.json: num_aux_hidden_states: {config['num_aux_hidden_states']} of the layers {ours}")
    if not all(0 <= k < layers + loader.last for k in ours):
        faults.append(f"layer {max(ours)} of {layers}, the last one's output, is never captured: take lower ones")
    if len(ours) < loader.fewest:
        faults.append(f"fc is left out where {len(ours)} layer is read: take {loader.fewest} or more")
    return faults


def check_mtp(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    """Modules of multi-token prediction, beside their target's own config.json."""
    name = (folder.config.get("architectures") or [None])[0]
    loader = MTP.get(name) if isinstance(name, str) else None
    if loader is None or reader not in loader.most:
        return f"has no class for modules of a {name}", []
    layout, most = LAYOUTS[loader.layout], loader.most[reader]
    try:
        register_mimo()
        own = {key: value for key, value in folder.config.items() if key not in ("draftsmith", "auto_map")}
        config: Any = AutoConfig.for_model(**own)
        layers = config.num_hidden_layers
        block = loader.block(config)
        count = count_modules(layout, folder.shapes, layers)
    except Exception as error:  # each family's config refuses in its own way
        return None, [f"config.json: not that of a {name} ({first_line(error)})"]
    D, expected = config.hidden_size, Shapes()
    for i in range(max(count, 1)):
        prefix = layout.of_module(i, layers)
        parts = dict(zip(PARTS, layout.parts, strict=True))
        for part, theirs in parts.items():
            expected[f"{prefix}{theirs}.weight"] = (D, 2 * D) if part == "input_proj" else (D,)
        expected |= {prefix + layout.block + key: shape for key, shape in block.items()}
    promised = getattr(config, loader.count, None)
    faults = fields(folder.config, {"architectures": [folder.target.get("architecture")]})
    if promised is not None and promised != count:
        faults.append(f"config.json: {loader.count}: {promised}, the file holds {count} modules")
    lacks = None if most is None or count <= most else f"takes at most {most} module, the head has {count}"
    return lacks, faults + tensors(expected, folder.shapes)


def check_draft(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    """A draft model, which is an ordinary model of Hugging Face's form."""
    name = str((folder.config.get("architectures") or [None])[0])
    lacks = None if name.endswith("ForCausalLM") else f"takes no {name} as a draft model"
    return lacks, fields(folder.config, {"vocab_size": folder.target["vocab_size"]})


def check_medusa(folder: Folder, reader: str) -> tuple[str | None, list[str]]:
    """Medusa heads."""
    config, name = folder.config, str(folder.target.get("architecture"))
    lacks = f"runs no {name}" if reader == MEDUSA and name not in MEDUSA_TARGETS else None
    faults = fields(config, MEDUSA_FIELDS) + sizes(config, MEDUSA_SIZES)
    return lacks, faults or tensors(medusa_tensors(config), folder.shapes)


CHECKS = {"eagle3": check_eagle3, "mtp": check_mtp, "draft": check_draft, "medusa": check_medusa}
"""kind of head -> the check of its folder for a reader: `Verdict.lacks` and `Verdict.faults`."""


def fields(config: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Faults of config.json's fields."""
    return [
        f"config.json: {name}: expected {value!r}, found {config.get(name)!r}"
        for name, value in expected.items()
        if config.get(name) != value
    ]


def sizes(config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Faults of the fields that shapes are worked out from."""
    bad = [name for name in names if type(config.get(name)) is not int or config[name] < 1]
    return [f"config.json: {name}: expected a positive number, found {config.get(name)!r}" for name in bad]


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
