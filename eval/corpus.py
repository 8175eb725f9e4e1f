"""Python source found on this machine, as training text.

Every machine that can run this project holds some hundred megabytes of real Python: the standard library and the
installed packages. Modules are split by a hash of their path relative to the folder that is on `sys.path`, so the split
is the same on every machine and for every version of a package: a module held out here was held out when the quickstart
target was trained.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from heads.base import UserError

HELD_OUT_PERCENT = 3
MIN_BYTES, MAX_BYTES = 1_000, 120_000
SKIPPED_FOLDERS = frozenset(
    {"tests", "test", "testing", "idlelib", "lib2to3", "__pycache__", "_vendor", "vendor", "node_modules"}
)


def source_roots() -> list[Path]:
    """The standard library's folder and the installed packages' folder of the running interpreter."""
    paths = sysconfig.get_paths()
    return [Path(paths["stdlib"]), Path(paths["purelib"])]


def is_held_out(relative_path: str) -> bool:
    """Whether a module belongs to the held-out split; a function of its path alone."""
    return int(hashlib.sha256(relative_path.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def list_modules(roots: list[Path], *, held_out: bool) -> list[tuple[str, Path]]:
    """(relative path, file) of every module of one split, sorted by the hash of the path: a fixed, mixed order."""
    modules: dict[str, Path] = {}
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root}: expected a folder of Python source; name one that exists")
        for path in root.rglob("*.py"):
            relative = path.relative_to(root)
            if SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]) and "site-packages" not in relative.parts:
                name = relative.as_posix()
                if is_held_out(name) == held_out:
                    modules.setdefault(name, path)
    return sorted(modules.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())


def read_module(path: Path) -> str | None:
    """The text of a module, or None where it is no readable source: too short, too long, a data table, not UTF-8."""
    data = path.read_bytes()
    if not MIN_BYTES <= len(data) <= MAX_BYTES:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    lines = text.splitlines()
    return None if len(data) > 100 * len(lines) or "\0" in text else text.replace("\r\n", "\n")


def long_lines(text: str) -> set[str]:
    """The lines that say something of their own: at least 24 characters after stripping."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 24}


def read_split(*, held_out: bool, roots: list[Path] | None = None) -> Iterator[tuple[str, str]]:
    """(relative path, text) of each module of a split.

    A module that repeats another is no evidence. Exact copies are given once. A training module of which more than half
    the long lines stand in held-out modules is left out, so that the held-out split is not learnt by heart from a near
    copy.
    """
    roots = source_roots() if roots is None else roots
    protected: set[str] = set()
    if not held_out:
        for _, kept_back in read_split(held_out=True, roots=roots):
            protected |= long_lines(kept_back)
    seen = set()
    for name, path in list_modules(roots, held_out=held_out):
        text = read_module(path)
        if text is None:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        if protected:
            lines = long_lines(text)
            if len(lines & protected) * 2 > len(lines):
                continue
        yield name, text
