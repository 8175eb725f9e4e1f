"""Checkpoints: everything a run needs to continue as if it had never stopped, written completely or not at all.

`checkpoints/step-N/` holds the head's weights and the optimizer's state as safetensors, `state.json`, and
`manifest.json` with the hash of each file. The data position, the learning rate and the random state are functions of
the step, so only the step is stored. The optimizer's settings are in the recipe. A measurement is made after the
checkpoint of its step, which gets a file `measured.json` when it is complete. Under FSDP every process writes its part
of the tensors with torch.distributed.checkpoint. A run of any form and number of processes can read both layouts.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from heads.errors import UserError, first_line
from heads.files import begin_folder, file_hash, is_full_disk, temporary_of, whole_folder, write_json
from train.averages import Sums
from train.launch import on_main
from train.parallel import Replicas

Say = Callable[[str], None]
MEASURED = ("best_tau", "best_step", "measured_step", "seconds")
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


def save_checkpoint(form: Replicas, folder: Path, state: RunState, *, keep: int) -> None:
    """Write `step-N`. After that, delete all but the newest `keep` checkpoints. Called by every process."""
    final = folder / f"step-{state.step}"
    temporary = temporary_of(final)
    weights, moments = form.weights(), form.moments()

    def write() -> None:
        with _explained(final), whole_folder(final, begun=form.in_parts):
            if not form.in_parts:
                (temporary / "head.safetensors").write_bytes(save(_plain(weights)))
                (temporary / "optimizer.safetensors").write_bytes(save(_plain(moments)))
            (temporary / "state.json").write_bytes(_json(asdict(state)))
            manifest = {
                file.name: {"bytes": file.stat().st_size, "sha256": file_hash(file)}
                for file in sorted(temporary.iterdir())
            }
            (temporary / "manifest.json").write_bytes(_json(manifest))
        for path in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(path)

    if form.in_parts:
        on_main(form.accelerator, lambda: begin_folder(final))
        with _explained(final):
            writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
            state_dict_saver.save({**weights, **moments}, storage_writer=writer)
    on_main(form.accelerator, write)


def save_measurement(folder: Path, state: RunState) -> None:
    """Add the measurement after `state.step` steps to their checkpoint. Called by the main process."""
    found = asdict(state)
    write_json(folder / f"step-{state.step}/measured.json", {name: found[name] for name in MEASURED})


def load_checkpoint(form: Replicas, folder: Path) -> None:
    """Load a checkpoint's weights and optimizer state. Called by every process; each reads the files itself. UserError
    if they belong to another head."""

    def read(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name not in stored or stored[name].size != tensor.shape:
                raise ValueError(f"{name} is missing or of another shape")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # each process reads alone
            state_dict_loader.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)

    try:
        stored: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        form.take_up(read, sorted(stored.keys() - form.trained.stored.state_dict().keys()))
    except (OSError, SafetensorError, CheckpointException, RuntimeError, ValueError, LookupError) as error:
        raise UserError(f"{folder}: cannot be gone on from ({first_line(error)}); {OR_ELSE}") from error


def newest_checkpoint(folder: Path, say: Say) -> tuple[Path, RunState] | None:
    """Return the newest intact checkpoint, or None. A damaged one is reported, and the one before it is used."""
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
    try:
        found = list_checkpoints(folder)
    except (OSError, ValueError):  # locking the folder raises the error for an impossible path
        return None
    for path in reversed(found):
        with suppress(OSError, ValueError):
            return read_state(path).precision
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of all checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint according to its manifest, or None if it is intact."""
    try:
        manifest = _read_json(path / "manifest.json")
        for name, expected in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"] or file_hash(file) != expected["sha256"]:
                return f"{name} was changed after it was written"
        if "state.json" not in manifest:
            return "its manifest lacks state.json"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its manifest is missing or unreadable"
    try:
        state = read_state(path)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        return f"state.json is not what this version writes ({where}: {first['msg']})"
    except (OSError, ValueError) as error:
        return f"state.json is not what this version writes ({first_line(error)})"
    return None if path.name == f"step-{state.step}" else f"state.json is of step {state.step}"


def read_state(path: Path) -> RunState:
    """Return the state in a checkpoint's folder. ValueError if the file is not a valid state. Without a valid
    measured.json, the measurement at its step is still to be made."""
    state = pydantic.TypeAdapter(RunState).validate_json((path / "state.json").read_bytes())
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        found = _read_json(path / "measured.json")
        return replace(state, **{name: found[name] for name in MEASURED})
    return state


def remove_leftovers(folder: Path) -> None:
    """Delete incomplete checkpoints that a killed process has left."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _explained(final: Path) -> Iterator[None]:
    """Turn the error for a full disk, in any process, into a UserError."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        if not any(is_full_disk(cause) for cause in causes):
            raise
        shutil.rmtree(temporary_of(final), ignore_errors=True)  # no process is still writing
        kept = [path.name for path in list_checkpoints(final.parent)]
        what = f"{', '.join(kept)} {'is' if len(kept) == 1 else 'are'} intact" if kept else "nothing was written"
        raise UserError(
            f"{final.parent}: no space left on the device for the checkpoint of {final.name.replace('-', ' ')}; "
            f"{what}; free some space and run the same command again"
        ) from error


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
