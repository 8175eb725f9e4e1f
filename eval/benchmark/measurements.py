"""Where measurements lie: each in a folder of its own, named for when it began and for its settings, so that none takes
another's place. The newest one is found by what its results.json says, whatever its folder is called."""

import argparse
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from eval.benchmark.prompts import split_prompts, suite_name
from eval.benchmark.results import Results, read_results

RESULTS = "results.json"
BENCH = "bench"
"""The folder in a run that later measurements of its head lie in."""
ALWAYS_NAMED = ("trees", "temperatures", "temperature", "prompts", "batch_sizes", "contexts")
"""Settings that a folder is named for even where they are the defaults."""
LONGEST_NAME = 150


@contextmanager
def own_folder(parent: Path, settings: Any, options: argparse.Namespace) -> Iterator[Path]:
    """The folder that `options` name with --out, else a new one in `parent` for a measurement by `settings`, a
    dataclass. A new folder, and what was made for it, vanish if nothing comes to lie in them."""
    if options.out:
        yield options.out
        return
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    folder = new_folder(parent, measurement_name(settings, options))
    try:
        yield folder
    finally:
        for place in (folder, *made):
            with suppress(OSError):  # it holds something
                place.rmdir()


def new_folder(parent: Path, name: str) -> Path:
    """Make a folder of that name, with a number where another process has just made one."""
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def measurement_name(settings: Any, options: argparse.Namespace) -> str:
    """`2026-11-03_14-05-12_chain-5_greedy_python-heldout`: the time, then what is measured, then all settings that are
    not the defaults."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    changed = [f.name for f in fields(settings) if f.name not in ALWAYS_NAMED and given[f.name] != f.default]
    words = [setting_text(name, given[name]) for name in (*ALWAYS_NAMED, *changed) if name in given]
    words += [word for word in (options.dtype, options.quantize) if word not in (None, "auto")]
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return plain_name("_".join([time, *words]))


def plain_name(text: str) -> str:
    """A text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)[:LONGEST_NAME].strip("-._+")


def setting_text(name: str, value: Any) -> str:
    """A setting as a word of a folder's name."""
    match name:
        case "trees":
            return "+".join(value)
        case "temperatures" | "temperature":
            values = value if isinstance(value, tuple) else (value,)
            return "+".join("greedy" if temperature == 0 else f"T{temperature:g}" for temperature in values)
        case "prompts":
            return "+".join(map(suite_name, split_prompts(value)))
    if value is True:
        return name
    return f"{name}-{'+'.join(map(str, value)) if isinstance(value, tuple) else value}".replace("_", "-")


def folders_of(run: Path) -> list[Path]:
    """The folders of a run's measurements: its own, and those in bench/."""
    return [run, *sorted((run / BENCH).glob("*"))]


def newest_results(folders: Iterable[Path]) -> tuple[Path, Results] | None:
    """The newest measurement in any of the folders and its results; of several as new the first. None where there is
    none; UserError for a results.json that is damaged."""
    found = [(folder, read_results(folder / RESULTS)) for folder in folders if (folder / RESULTS).is_file()]
    return max(found, key=lambda pair: str(pair[1]["measured_at"]), default=None)
