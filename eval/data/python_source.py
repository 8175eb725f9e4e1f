"""Python source on this machine as text for training and for prompts.

Heads are trained and measured on the standard library, which is the same for the same version of Python, whatever
packages are installed. Modules are split by a hash of their path relative to the folder on `sys.path`, so the split is
the same on every machine and for every version: a module that is held out here was also held out when the quickstart
target was trained.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from heads.core.errors import UserError

HELD_OUT_PERCENT = 3
MIN_BYTES, MAX_BYTES = 1_000, 120_000
SKIPPED_FOLDERS = frozenset(
    {"tests", "test", "testing", "idlelib", "lib2to3", "__pycache__", "_vendor", "vendor", "node_modules"}
    | {"site-packages", "dist-packages"}  # inside the standard library's folder
    | {"encodings"}  # tables of characters
)


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(relative_path: str) -> bool:
    """Return True if a module belongs to the held-out split. The result depends only on its path."""
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()) % 100 < HELD_OUT_PERCENT


@cache
def list_modules(root: Path) -> dict[bool, list[tuple[str, Path]]]:
    """Return (relative path, file) of every module by split, sorted by the hash of the path: a fixed, mixed order.

    Cached, because walking about ten thousand folders takes seconds.
    """
    modules: dict[str, Path] = {}
    if not root.is_dir():
        raise UserError(f"{root}: expected a folder of Python source; name one that exists")
    for place, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for name in files:
            if name.endswith(".py"):
                path = Path(place, name)
                modules[path.relative_to(root).as_posix()] = path
    splits: dict[bool, list[tuple[str, Path]]] = {True: [], False: []}
    for name in sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest()):
        splits[is_held_out(name)].append((name, modules[name]))
    return splits


def read_module(path: Path) -> str | None:
    """Return the text of a module, or None if it is too short, too long, a data table, unreadable or not UTF-8."""
    try:
        data = path.read_bytes()
        if not MIN_BYTES <= len(data) <= MAX_BYTES:
            return None
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    lines = text.splitlines()
    return None if len(data) > 100 * len(lines) or "\0" in text else text.replace("\r\n", "\n")


def long_lines(text: str) -> set[str]:
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 24}


@cache
def protected_lines(root: Path) -> frozenset[str]:
    return frozenset().union(*(long_lines(text) for _, text in read_split(held_out=True, root=root)))


def read_split(*, held_out: bool, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of each module of a split, read lazily. Default root: the standard library.

    Exact copies are yielded once. A training module is left out if more than half of its long lines are also in
    held-out modules, so that the held-out split cannot be memorised from a near copy.
    """
    root = standard_library() if root is None else root
    seen = set()
    for name, path in list_modules(root)[held_out]:
        text = read_module(path)
        if text is None:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        if not held_out:
            lines = long_lines(text)
            if len(lines & protected_lines(root)) * 2 > len(lines):
                continue
        yield name, text
