"""Files and folders that are complete or absent, even after a power cut."""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from heads.core.errors import UserError, warn_once

VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def expanded(path: str) -> str:
    """Return a path as a shell reads it: with a home folder in place of `~`, and with the values of variables, such as
    `$HOME`. The name of something that is there stays as it is. UserError for an unknown user or variable."""
    if not (path.startswith("~") or VARIABLE.search(path)) or os.path.lexists(path):
        return path
    whole = os.path.expanduser(os.path.expandvars(path))
    unknown = VARIABLE.search(whole) or re.match("~[^/]*", whole)
    if unknown:
        what = "user with a home folder" if whole.startswith("~") else "variable"
        raise UserError(f"{path}: no {what} {unknown[0]} here; write the whole path")
    return whole


def lock(file: int, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool | None:
    """Lock an open file by `fcntl.flock` until it is closed. Return False if another process holds the lock. Return
    None, after one warning, if the file system has no locks, as on some clusters."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        warn_once(
            f"a file system here has no locks ({error.strerror}): nothing keeps a second run out of this run's folder "
            "and of the cache of its data, so start none"
        )
        return None
    return True


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def swap(one: Path, other: Path) -> None:
    """Swap two folders next to each other: in one operation, so that both names exist at any time, on file systems of
    Linux that support it (renameat2), elsewhere by renaming."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None or rename(here, os.fsencode(one), here, os.fsencode(other), exchange) != 0:
        aside = other.with_name(f".{other.name}.old")
        other.rename(aside)
        one.rename(other)
        aside.rename(one)


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `final` on success and is deleted on failure."""
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        if final.exists():
            swap(temporary, final)
            shutil.rmtree(temporary)
        else:
            temporary.rename(final)
        sync(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all, and create its folder. Raises UserError if it cannot be written."""
    write_bytes(path, text.encode(errors="backslashreplace"))  # the name of a file need not be Unicode


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_bytes(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file, whole or in parts, completely or not at all, and create its folder. Raises UserError if it cannot
    be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)
    except OSError as error:
        raise UserError(f"{path}: could not be written ({error.strerror}); free space or name another place") from error


def is_file(path: str | Path) -> bool:
    """Return True if the path is a file; False also for a name that cannot be a path, such as one that is too long."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def read_given(path: Path, what: str) -> str:
    """Return the text of a file that a user named. `what` describes it in errors. Raises UserError if it is absent or
    not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected UTF-8 text ({error.reason} at byte {error.start})") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError) as error:  # a folder, no permission, a name too long, a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read ({reason}); expected {what}") from None


def check_folder(path: Path, name: str) -> None:
    """Raise UserError for a folder that cannot be created or written to, before hours are spent on its content."""
    try:
        if broken := next(
            (place for place in (path, *path.parents) if place.is_symlink() and not place.exists()), None
        ):
            raise UserError(
                f"{name} {path}: {broken} is a link to {broken.readlink()}, which is not there; name another"
            )
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    except (OSError, ValueError) as error:
        raise UserError(f"{name} {path}: no path that can be used ({error}); name another") from None
    if not nearest.is_dir():
        raise UserError(f"{name} {path}: expected a folder, {nearest} is a file; name another")
    if path.suffix == ".json" and nearest != path:
        raise UserError(f"{name} {path}: expected a folder, which holds several files; leave out .json")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{name} {path}: no permission to write there; name another")


def check_empty(path: Path) -> None:
    """Raise UserError for a folder that already holds something, which `whole_folder` would replace."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: there is something already; name a new or an empty folder")


def check_file(path: Path, name: str) -> None:
    """Raise UserError for a file that cannot be written, before hours are spent on its content."""
    if path.is_dir():
        raise UserError(f"{name} {path}: expected a file, it is a folder; name a file in it")
    check_folder(path.parent, name)


def is_full_disk(error: BaseException) -> bool:
    """Return True if an error means that no space is left: on the disk, in a quota, or in one file. safetensors raises
    its own type of error, with the number in its text."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError):
        return error.errno in numbers
    return any(f"(os error {number})" in str(error) for number in numbers)
