"""Folders of measurements and their names. The newest measurement is found by the time in its file, whatever its folder
is called."""

import argparse
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile

from eval.core.command_line import print_line
from eval.data.prompts import split_prompts, suite_name
from eval.records.journal import Journal, holds, keep_journal
from eval.records.measure_settings import BenchSettings
from eval.records.results import read_results
from eval.records.schema import Results
from heads.core.contract import LOOKUP
from heads.core.errors import UserError
from heads.core.files import check_folder

RESULTS = "results.json"
BENCH = "bench"
"""Folder in a run for later measurements of its head."""
LONGEST_NAME = 150
LOOKUP_BEFORE = re.compile(rf"{LOOKUP}\d+\+(?=.)")
VAGUE_NAMES = ("head", "target", "model")


@contextmanager
def own_folder(
    parent: Path, settings: BenchSettings, options: argparse.Namespace, about: dict[str, object]
) -> Iterator[tuple[Path, Journal]]:
    """Yield the folder named with --out, or one in `parent` for a measurement with `settings`, and its journal: where
    a measurement `about` the same was interrupted, that folder, else a new one. On exit new folders are removed if they
    are empty. Raise UserError for a folder that cannot be written to, before hours are spent on its content."""
    place = options.out or parent
    check_folder(place, "--out")
    new_folders = [folder for folder in (place, *place.parents) if not folder.exists()]
    try:
        place.mkdir(parents=True, exist_ok=True)
        name = measurement_name(settings)
        if not options.out:
            held = (folder for folder in sorted(parent.iterdir()) if holds(folder, about))
            place = next((folder for folder in held if not (folder / RESULTS).is_file()), parent)  # it may end just now
        for number in count(1) if place == parent and not options.out else ():
            place = parent / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):  # another process has just made a folder of this name
                place.mkdir()
                new_folders.insert(0, place)
                break
        TemporaryFile(dir=place).close()  # the rights of a folder do not tell: root may write everywhere but in /proc
    except OSError as error:
        raise UserError(f"--out {place}: cannot be written to ({error.strerror}); name another") from None
    if (place / RESULTS).is_file():
        print_line(f"--out {place}: the {RESULTS} there will be replaced")
    try:
        with keep_journal(place, about) as journal:
            if journal.number:
                print_line(f"{place}: going on with the measurement that was interrupted")
            yield place, journal
    finally:
        for folder in new_folders:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def measurement_name(settings: BenchSettings) -> str:
    """Return a name such as `2026-11-03_14-05-12_python-heldout`: the time and the prompts."""
    suites = "+".join(map(suite_name, split_prompts(settings.prompts)))
    return plain_name(f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{suites}")


def plain_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)[:LONGEST_NAME].strip("-._+")


def short_name(path: str) -> str:
    """Return a Hub id unchanged, or the last part of a path (the last two parts if the last one is uninformative), each
    after the lookup of a draft that has one. Control characters are replaced."""
    if (match := LOOKUP_BEFORE.match(path)) is not None:
        return f"{match[0]}{short_name(path[match.end() :])}"
    path = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in path)
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    if not parts or (len(parts) == 2 and not path.startswith(("/", "."))):
        return path
    return "/".join(parts[-2:]) if parts[-1] in VAGUE_NAMES else parts[-1]


def folders_of(run: Path) -> list[Path]:
    return [run, *sorted((run / BENCH).glob("*"))]


def newest_results(folders: Iterable[Path], *, served: bool = False) -> tuple[Path, Results] | None:
    """Return the folder and the results of the newest measurement in some folders, here or of a server (`served`), or
    None if there is none. Of equally new ones, return the first. Raise UserError if a results.json is damaged."""
    return next((pair for pair in results_in(folders) if (pair[1].server is not None) == served), None)


def results_in(folders: Iterable[Path]) -> list[tuple[Path, Results]]:
    """Return the measurements in some folders, the newest first. Raise UserError if a results.json is damaged."""
    read = [(folder, read_results(folder / RESULTS)) for folder in folders if (folder / RESULTS).is_file()]
    return sorted(read, key=lambda pair: pair[1].measured_at, reverse=True)
