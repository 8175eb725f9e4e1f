"""Python source found on this machine, as training text.

Heads and prompts take it from the standard library, which is the same wherever the same Python is, whatever packages
are installed beside it. A target trained from scratch needs more, and takes the installed packages too. Modules are
split by a hash of their path relative to the folder that is on `sys.path`, so the split is the same on every machine
and for every version: a module held out here was held out when the quickstart target was trained.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from heads.errors import UserError

HELD_OUT_PERCENT = 3
MIN_BYTES, MAX_BYTES = 1_000, 120_000
SKIPPED_FOLDERS = frozenset(
    {"tests", "test", "testing", "idlelib", "lib2to3", "__pycache__", "_vendor", "vendor", "node_modules"}
    | {"site-packages", "dist-packages"}  # inside the standard library's folder; the interpreter's own is another root
    | {"encodings"}  # tables of characters
)


def standard_library() -> tuple[Path, ...]:
    """The folder of the running interpreter's standard library."""
    return (Path(sysconfig.get_paths()["stdlib"]),)


def installed_source() -> tuple[Path, ...]:
    """The standard library's folder and the installed packages' folder of the running interpreter."""
    return (*standard_library(), Path(sysconfig.get_paths()["purelib"]))


def is_held_out(relative_path: str) -> bool:
    """Return True if a module belongs to the held-out split; a function of its path alone."""
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()) % 100 < HELD_OUT_PERCENT


@cache
def list_modules(roots: tuple[Path, ...]) -> dict[bool, list[tuple[str, Path]]]:
    """(relative path, file) of every module by split, sorted by the hash of the path: a fixed, mixed order.

    Walking some ten thousand folders takes seconds, so it is done once a process.
    """
    modules: dict[str, Path] = {}
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root}: expected a folder of Python source; name one that exists")
        for place, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            prefix = os.path.relpath(place, root).replace(os.sep, "/") + "/"
            for name in files:
                if name.endswith(".py"):
                    modules.setdefault((prefix + name).removeprefix("./"), Path(place, name))
    splits: dict[bool, list[tuple[str, Path]]] = {True: [], False: []}
    for name in sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest()):
        splits[is_held_out(name)].append((name, modules[name]))
    return splits


def read_module(path: Path) -> str | None:
    """The text of a module, or None where it is no readable source: too short, too long, a data table, not UTF-8."""
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
    """The lines that say something of their own: at least 24 characters after stripping."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 24}


@cache
def protected_lines(roots: tuple[Path, ...]) -> frozenset[str]:
    """Every long line of the held-out split."""
    return frozenset().union(*(long_lines(text) for _, text in read_split(held_out=True, roots=roots)))


def read_split(*, held_out: bool, roots: tuple[Path, ...] | None = None) -> Iterator[tuple[str, str]]:
    """(relative path, text) of each module of a split, read one by one as they are asked for; of the standard library
    by default.

    A module that repeats another is no evidence. Exact copies are given once. A training module of which more than half
    the long lines stand in held-out modules is left out, so that the held-out split is not learnt by heart from a near
    copy.
    """
    roots = standard_library() if roots is None else roots
    seen = set()
    for name, path in list_modules(roots)[held_out]:
        text = read_module(path)
        if text is None:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        if not held_out:
            lines = long_lines(text)
            if len(lines & protected_lines(roots)) * 2 > len(lines):
                continue
        yield name, text
