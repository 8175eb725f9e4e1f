"""The loader contract: checks of a head's folder against its format's rules for each reader.

Only config.json and the names and shapes of the tensors are read. Every reader of a head's kind gets a verdict: the
command that serves the head, or the reason why there is none. `lacks` is the reason of a reader that supports no such
head, whatever its folder holds. `faults` are the parts of a folder that a reader would refuse or, worse, load as
another head.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from heads.errors import UserError, first_line
from heads.formats.base import ENGINES, Folder, Format

PORTABLE = (
    "the portable form is an EAGLE-3 file, with eagle_config.use_aux_hidden_state: false where the head reads the last "
    "hidden state alone"
)
"""Advice on the form that both engines load for most targets."""


@dataclass(frozen=True)
class Verdict:
    """Result of checking a folder against one reader."""

    reader: str
    command: str
    lacks: str | None
    """Reason why the reader supports no such head, whatever its folder holds."""
    faults: tuple[str, ...]
    """Parts of the folder that the reader would refuse or misread."""

    @property
    def serves(self) -> bool:
        """True if the command serves the head."""
        return self.lacks is None and not self.faults

    @property
    def reason(self) -> str:
        """Reason why the command does not serve the head, in words that follow the reader's name."""
        if not self.faults:
            return str(self.lacks)
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"would misread it: {self.faults[0]}{more}"


def check_folder(
    folder: Path, form: Format, kind: str, target: Mapping[str, Any], *, name: str, base: str, steps: int
) -> list[Verdict]:
    """Return the verdicts on a head's folder, the engines' first. Raises UserError if the folder cannot be read.

    target: the head's record of its target. The commands name the head `name` and its target `base`, and draft `steps`
    tokens per round.
    """
    found = read_folder(folder / "config.json", folder / form.weights_file, target)
    base = shlex.quote(base) + (" --trust-remote-code" if "auto_map" in found.config else "")
    verdicts = []
    for reader in dict.fromkeys((*ENGINES, *form.readers)):
        if reader in form.readers:
            lacks, faults = form.check(found, reader)
            command = form.readers[reader](base, name, steps, found.config)
            verdicts.append(Verdict(reader, command, lacks, tuple(faults)))
        else:
            verdicts.append(Verdict(reader, "", f"has no method for heads of kind {kind}", ()))
    return verdicts


def why_unfit(verdicts: Sequence[Verdict]) -> str | None:
    """Return the reason why a head is unfit for engines: none serves it, or one would misread it. None if it is fit."""
    engines = [verdict for verdict in verdicts if verdict.reader in ENGINES]
    served, misread = any(verdict.serves for verdict in engines), any(verdict.faults for verdict in engines)
    if served and not misread:
        return None
    why = "; ".join(f"{verdict.reader} {verdict.reason}" for verdict in engines if not verdict.serves)
    return why if misread else f"no engine serves it: {why}; {PORTABLE}"


def read_folder(config_file: Path, weights: Path, target: Mapping[str, Any]) -> Folder:
    """Return config.json and the shapes of the tensors."""
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
