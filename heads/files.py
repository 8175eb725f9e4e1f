"""Folders that are complete or absent, even after a power cut."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_of(final: Path) -> Path:
    """The folder in which `final` is written until it is whole."""
    return final.with_name(f".{final.name}.tmp")


def begin_folder(final: Path) -> None:
    """Make the temporary folder of `final`, empty."""
    shutil.rmtree(temporary_of(final), ignore_errors=True)
    temporary_of(final).mkdir(parents=True)


@contextmanager
def whole_folder(final: Path, *, begun: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `final` if all goes well, and vanishes if not. `begun`: it is there already."""
    temporary = temporary_of(final)
    if not begun:
        begin_folder(final)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        if final.exists():  # a broken one: only now that its successor is whole
            shutil.rmtree(final)
        temporary.replace(final)
        sync(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
