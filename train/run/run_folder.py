"""The folder of a run: its files and its lock. A write is complete or absent."""

import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from eval.data.data_files import is_local
from eval.data.prompts import absolute_prompts
from eval.measure.machine import device_facts, versions
from eval.pages.card import check_card
from eval.records.provenance import Provenance, TrainingData
from eval.records.schema import Device
from eval.runtime.sampling_params import FILTERS
from heads.core.errors import UserError, first_line, shown
from heads.core.files import check_folder, lock, write_json, write_text
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import absolute
from heads.targets.identity import changes
from train.core.strict_yaml import read_settings
from train.recipe.recipe import OWN, PROVENANCE, dump_recipe, in_its_folder

FREE_SETTINGS = (
    ("output_dir",),
    ("tracking",),
    ("data", "regenerate", "batch_size"),
    *(("data", "regenerate", "server", name) for name in ("url", "engine", "in_flight")),
    *(("features", name) for name in ("url", "in_flight", "folder")),
    ("train", "checkpoint_every"),
    ("train", "keep_checkpoints"),
    ("train", "log_every"),
    ("eval", "batch_size"),
    ("eval", "report"),
)
"""Settings that may change when a run is resumed, since they do not change its result."""

LENGTH = ("train", "max_steps")

RESOLVED = "The recipe as resolved: the file and its overrides, with every default."
REPORT_SAMPLING = tuple(("eval", name) for name in ("rule", *FILTERS))
"""Settings that are absent if nothing is sampled. If only `eval.report.temperature` decides that, they concern only
the report."""

FILES = ("path", "chat_template", "held_out")
"""Keys of a data source whose values may be files or folders."""
PLACES = (("target", "path", "adapter"), ("head", "path", "init_from"), ("features", "folder"))
"""Further such keys, behind their sections."""


class RunFolder:
    """The folder of one run and the paths in it. At most one process at a time holds its lock."""

    def __init__(self, path: Path):
        self.path = path
        self.recipe = path / OWN
        self.checkpoints = path / "checkpoints"
        self.head = path / "head"
        self.metrics = path / "metrics.jsonl"
        self.provenance = path / PROVENANCE
        self.data = path / "data.json"
        self.results = path / "results.json"
        self.card = path / "README.md"
        self._lock: int | None = None
        self._made: list[Path] = []

    def lock(self) -> None:
        """Lock the folder, and create it if necessary. UserError if another process holds it or it is not writable."""
        check_folder(self.path, "output_dir")
        check_card(self.path, "output_dir")
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise UserError(f"output_dir {self.path}: cannot be written to ({error}); name another") from None
        if lock(self._lock) is False:
            holder = os.read(self._lock, 32).decode(errors="replace").strip()
            os.close(self._lock)
            self._lock = None
            who = f"process {holder}" if holder else "another process"
            raise UserError(f"output_dir {self.path}: in use by {who}; wait for it to end or name another folder")
        os.truncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())

    def unlock(self) -> None:
        """Release the folder. Remove it if this run created it and wrote nothing into it."""
        if self._lock is None:
            return
        if self._made and [path.name for path in self.path.iterdir()] == [".lock"]:
            (self.path / ".lock").unlink()
            for path in self._made:
                with suppress(OSError):  # another process uses it by now
                    path.rmdir()
        os.close(self._lock)
        self._lock = None

    def first_day(self) -> date:
        """Return the date on which a run in this folder first read its data."""
        if not self.data.is_file():
            write_json(self.data, {"date": str(date.today())})
        try:
            return date.fromisoformat(json.loads(self.data.read_bytes())["date"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{self.data}: does not say on which day the run began ({first_line(error)}); restore it, or name "
                "another output_dir"
            ) from None

    def max_steps(self) -> int | None:
        """Return the number of steps of the run whose checkpoints the folder holds, or None if it is not known."""
        if not any(self.checkpoints.glob("step-*")):
            return None
        try:
            steps = read_settings(self.recipe).tree["train"]["max_steps"]
        except (UserError, LookupError, TypeError):
            return None
        return steps if isinstance(steps, int) else None

    def check_recipe(self, record: dict[str, object]) -> None:
        """Raise UserError if the folder holds a run with checkpoints and other settings than `record`, a recipe's plain
        settings. The error names the differences."""
        if not self.recipe.is_file():
            return
        try:
            old = in_its_folder(read_settings(self.recipe), self.recipe).tree
        except UserError as error:
            raise UserError(f"{error}; name another output_dir") from None
        record = with_absolute_paths(record)

        def is_free(key: tuple[str, ...]) -> bool:
            return any(key[: len(free)] == free for free in FREE_SETTINGS)

        changed = [
            (key, was, now)
            for key, was, now in differences(old, record)
            if not is_free(key) and not (key in REPORT_SAMPLING and None in (was, now)) and not _is_same_place(was, now)
        ]
        if not changed or not any(self.checkpoints.glob("step-*")):
            return
        each = [f"{'.'.join(key)} was {_shown(was)}, is {_shown(now)}" for key, was, now in changed]
        more = [f"{len(each) - 4} more"] if len(each) > 4 else []
        anew = "train from the first step on in another output_dir"
        if any(key == LENGTH for key, _, _ in changed) and self.head.is_dir():
            anew += f", which head.init_from={self.path} begins with this run's head: its schedule is of its own length"
        raise UserError(
            f"output_dir {self.path}: holds a run with other settings ({'; '.join(each[:4] + more)}); restore them to "
            f"go on with it, or {anew}"
        )

    def write_provenance(
        self, record: dict[str, Any], data_hash: str, target: FrozenTarget, num_processes: int
    ) -> Provenance:
        """Write recipe.yaml and provenance.json at the start of a run, and return the provenance. UserError if the
        folder holds checkpoints of a run on another target."""
        changed: list[str] = []
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            changed = changes(json.loads(self.provenance.read_bytes())["target"], target.identity)
        if changed and any(self.checkpoints.glob("step-*")):
            raise UserError(
                f"output_dir {self.path}: holds a run on another target than {target.name} ({'; '.join(changed)}); "
                "name that target, or another output_dir"
            )
        self.write_recipe(record)
        dtype = str(target.dtype).removeprefix("torch.")
        provenance = Provenance(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=[Path(sys.argv[0]).name, *sys.argv[1:]],
            versions=versions(),
            device=Device.model_validate(device_facts(target.device)),
            num_processes=num_processes,
            target={"path": absolute(target.name), **target.identity, "dtype": dtype},
            data=TrainingData.model_validate({"sources": record["data"], "sha256": data_hash}),
            steps=record["train"]["max_steps"],
            serve=record["head"]["serve"],
        )
        write_json(self.provenance, provenance.model_dump(exclude_unset=True))
        return provenance

    def write_recipe(self, record: dict[str, object], about: str = RESOLVED) -> None:
        write_text(self.recipe, f"# {about}\n{dump_recipe(with_absolute_paths(record))}")


def with_absolute_paths(record: dict[str, Any]) -> dict[str, object]:
    """Return the plain settings of a recipe that mean the same in every working folder."""
    record = copy.deepcopy(record)
    places = [(record["data"]["sources"][n], name) for n in range(len(record["data"]["sources"])) for name in FILES]
    for section, *names in PLACES:
        places += [(record.get(section, {}), name) for name in names]
    for settings, name in places:
        if isinstance(value := settings.get(name), str) and is_local(value):
            settings[name] = os.path.abspath(value)
    record["eval"]["prompts"] = absolute_prompts(record["eval"]["prompts"])
    return record | {"output_dir": os.path.abspath(record["output_dir"])}


def differences(
    old: object, new: object, key: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object, object]]:
    """Yield the leaves that differ between two nested mappings, each as (key, old, new)."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and isinstance((*old, None)[0], dict):
        old, new = dict(enumerate(old)), dict(enumerate(new))  # data sources
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), (*key, str(name)))
    elif old != new:
        yield key, old, new


def _is_same_place(was: Any, now: Any) -> bool:
    """Return True for a file or folder that may have moved or been copied with the run. The hash of the data and the
    target's fingerprint tell whether it is the same."""
    texts = isinstance(was, str) and isinstance(now, str)
    return texts and os.path.isabs(now) and os.path.basename(was) == os.path.basename(now)


def _shown(value: object) -> str:
    return "absent" if value is None else shown(value)
