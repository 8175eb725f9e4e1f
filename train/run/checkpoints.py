"""Checkpoints: everything a run needs to continue as if it had never stopped, written completely or not at all.

`checkpoints/step-N/` holds the head's weights and the optimizer's state as safetensors, `state.json`, and
`manifest.json` with the SHA-256 of each file. The data position, the learning rate and the random state are functions
of the step, so only the step is stored. The optimizer's settings are in the recipe. A measurement is made after the
checkpoint of its step, which gets a file `measured.json` when it is complete. The tensors are whole, so a
run under any parallel strategy and in any number of processes can read them.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from heads.core.errors import UserError, first_line
from heads.core.files import file_hash, is_full_disk, whole_folder, write_json
from heads.saved import read_config
from train.core.processes import on_main
from train.steps.parallel import Replicated
from train.steps.stepper import Sums

Say = Callable[[str], None]
HEAD, OPTIMIZER, STATE, MANIFEST = "head.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
MEASURED = ("best_tau", "best_step", "measured_step")
"""Fields of the state in measured.json, which is not in the manifest."""
OR_ELSE = "delete it to use the checkpoint before it, or name another output_dir"
Natural = Annotated[int, pydantic.Field(ge=0, lt=2**63)]


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class RunState:
    """The state of a run apart from its weights and its optimizer."""

    data: str
    """Hash of the training data."""
    num_processes: Natural
    num_threads: Natural
    rows: Natural
    """Rows of a step, over all processes."""
    precision: Literal["no", "bf16"]
    """Precision of matrix products, in Accelerate's terms."""
    step: Natural = 0
    """Optimizer steps made so far."""
    tokens: Natural = 0
    """Tokens seen, without padding."""
    seconds: Annotated[float, pydantic.Field(ge=0)] = 0.0
    """Of the steps, with the samples that some of them need, without measurements."""
    best_tau: float | None = None
    best_step: Natural | None = None
    measured_step: Natural | None = None
    """The last step after which tau was measured."""
    interval: Sums | None = None
    """Sums over the steps since the last log line."""

    def __post_init__(self) -> None:
        measured = [self.best_tau, self.best_step, self.measured_step]
        if any(value is None for value in measured) and any(value is not None for value in measured):
            raise ValueError("best_tau, best_step and measured_step go together")
        if max(self.best_step or 0, self.measured_step or 0) > self.step:
            raise ValueError("a measurement after the last step")


def save_checkpoint(strategy: Replicated, folder: Path, state: RunState, *, keep: int) -> None:
    """Write `step-N`. After that, delete all but the newest `keep` checkpoints. Called by every process."""
    weights, optimizer_state = strategy.weights(), strategy.optimizer_state()
    on_main(strategy.accelerator, lambda: _write(folder, state, {HEAD: weights, OPTIMIZER: optimizer_state}, keep))


def _write(folder: Path, state: RunState, files: dict[str, dict[str, Tensor]], keep: int) -> None:
    try:
        with whole_folder(folder / f"step-{state.step}") as temporary:
            for name, tensors in files.items():
                # safetensors refuses tensors that share memory, such as tied embeddings.
                copies = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}
                (temporary / name).write_bytes(save(copies))
            write_json(temporary / STATE, asdict(state))
            write_json(temporary / MANIFEST, {name: file_hash(temporary / name) for name in (HEAD, OPTIMIZER, STATE)})
    except (OSError, SafetensorError) as error:
        if not is_full_disk(error):
            raise
        intact = [path.name for path in list_checkpoints(folder)]
        what = f"{', '.join(intact)} {'is' if len(intact) == 1 else 'are'} intact" if intact else "nothing was written"
        raise UserError(
            f"{folder}: no space left on the device for the checkpoint of step {state.step}; {what}; free some space "
            "and run the same command again"
        ) from error
    for path in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(path)


def save_measurement(folder: Path, state: RunState) -> None:
    """Add the measurement after `state.step` steps to their checkpoint. Called by the main process."""
    write_json(folder / f"step-{state.step}/measured.json", {name: getattr(state, name) for name in MEASURED})


def load_checkpoint(strategy: Replicated, folder: Path) -> None:
    """Load a checkpoint's weights and optimizer state. Called by every process; the main process reads the files.
    UserError if they belong to another head or optimizer."""
    tensors = [_read_on_main(strategy.accelerator, folder, name) for name in (HEAD, OPTIMIZER)]
    try:
        strategy.load(*tensors)
    except (ValueError, LookupError) as error:
        raise _unfit(folder, error) from error


def _read_on_main(accelerator: Accelerator, folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors in a file of a checkpoint. The main process reads it and hands them on one by one, since the
    other processes may be on machines without it."""
    tensors: dict[str, Tensor] = {}

    def read() -> dict[str, tuple[torch.Size, torch.dtype]]:
        try:
            tensors.update(load_file(folder / name))
        except (OSError, SafetensorError, ValueError, LookupError) as error:  # LookupError: a dtype unknown to torch
            raise _unfit(folder, error) from error
        return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    outlines = on_main(accelerator, read)
    for name, (shape, dtype) in outlines.items() if accelerator.num_processes > 1 else ():
        tensor = tensors[name] if accelerator.is_main_process else torch.empty(shape, dtype=dtype)
        tensor = tensor.to(accelerator.device)
        broadcast(tensor.reshape(-1).view(torch.uint8))
        tensors[name] = tensor.cpu()
    return tensors


def _unfit(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder}: cannot be resumed from ({first_line(error)}); {OR_ELSE}")


def left_behind(path: Path) -> str | None:
    """Return a line if the head of a run, which is its best measured one, is older than its newest checkpoint. `path`:
    of the run or of its head."""
    run = path.parent if path.name == "head" else path
    steps = [int(folder.name[5:]) for folder in (run / "checkpoints").glob("step-*") if folder.name[5:].isdigit()]
    if not steps or not (run / "head").is_dir():
        return None
    step = read_config(run / "head").get("provenance", {}).get("step")
    if step is None or step >= max(steps):
        return None
    return f"head.init_from: {path}: its head is of step {step:,}, its newest checkpoint of step {max(steps):,}"


def newest_checkpoint(folder: Path, say: Say) -> tuple[Path, RunState] | None:
    """Return the newest intact checkpoint, or None. A damaged one is reported, and the one before it is used. What an
    interrupted write left behind is removed."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in reversed(list_checkpoints(folder)):
        fault = find_fault(path)
        if fault is None:
            return path, read_state(path)
        say(f"warning: {path}: {fault}; using the checkpoint before it")
    return None


def check_continues(path: Path, state: RunState, now: RunState, depths: int, say: Say) -> None:
    """Raise UserError for a checkpoint of another run. `now`: the state of the run at its start. `depths`: the number
    of depths of its head."""
    if state.data != now.data:
        raise UserError(
            f"{path}: was trained on other data than the recipe's sources give now; "
            "restore them or name another output_dir"
        )
    if state.precision != now.precision:
        names = {"bf16": "bf16", "no": "fp32"}
        raise UserError(
            f"{path}: was trained in {names[state.precision]}, this run is in {names[now.precision]}; "
            "leave train.precision as it was, or name another output_dir"
        )
    if state.interval is not None and not state.interval.fits(depths):
        raise UserError(f"{path}: its figures are not of this head's {depths} depths; {OR_ELSE}")
    for what in ("processes", "threads"):
        was, number = getattr(state, f"num_{what}"), getattr(now, f"num_{what}")
        if was != number:
            say(
                f"warning: {path}: was trained with {was} {what}, this run has {number}; "
                "it goes on with the same rows, but not bit for bit"
            )


def begun_in(folder: Path) -> str | None:
    """Return the precision of the newest readable checkpoint in `folder`, or None if there is none."""
    with suppress(OSError, ValueError):  # locking the folder raises the error for an impossible path
        for path in reversed(list_checkpoints(folder)):
            with suppress(OSError, ValueError):
                return read_state(path).precision
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    steps = {path: path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir()}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint according to its manifest, or None if it is intact."""
    try:
        manifest = pydantic.TypeAdapter(dict[str, str]).validate_json((path / MANIFEST).read_bytes())
        for name in (HEAD, OPTIMIZER, STATE):
            if file_hash(path / name) != manifest[name]:
                return f"{name} was changed after it was written"
        state = read_state(path)
    except (OSError, ValueError, LookupError) as error:
        return f"incomplete, or not written by this version ({first_line(error)})"
    return None if path.name == f"step-{state.step}" else f"{STATE} is of step {state.step}"


def read_state(path: Path) -> RunState:
    """Return the state in a checkpoint's folder. ValueError if the file is not a valid state. Without a valid
    measured.json, the measurement at its step is still to be made."""
    state = pydantic.TypeAdapter(RunState).validate_json((path / STATE).read_bytes())
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        measured = json.loads((path / "measured.json").read_bytes())
        return replace(state, **{name: measured[name] for name in MEASURED})
    return state
