"""Models on the Hugging Face Hub: OWNER/NAME as it stands, or OWNER/NAME@REVISION, a branch, a tag or a commit."""

import re
from pathlib import Path
from typing import Any

NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
PINNED = re.compile(rf"({NAME}/{NAME})@([A-Za-z0-9_][A-Za-z0-9_./-]*)")
MODEL = re.compile(rf"(?:{NAME}/)?{NAME}")
"""Names of models without an owner: a few old ones."""


def is_here(name: str) -> bool:
    """Return True if there is such a file or folder; False also for a name that cannot be a path, such as one too
    long."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def repo_and_revision(name: str) -> tuple[str, str | None]:
    """Split a name into the Hub's arguments, repository and revision. A local folder and a name without @ stay
    whole."""
    pinned = PINNED.fullmatch(name)
    if pinned is None or is_here(name):
        return name, None
    return pinned[1], pinned[2]


def is_hub_id(name: str) -> bool:
    """Return True for OWNER/NAME as the Hub has them, with or without @REVISION, unless it is a folder here."""
    repo, _ = repo_and_revision(name)
    whole = re.fullmatch(f"{NAME}/{NAME}", repo) is not None
    return whole and "--" not in repo and ".." not in repo and len(repo) <= 96 and not Path(name).exists()


def name_of(path: str) -> str:
    """A name that says nothing of this machine: of a path or an address the last part; an id of the Hub stays."""
    return path if "/" not in path or is_hub_id(path) else path.partition("?")[0].rstrip("/").rpartition("/")[2]


def with_names(value: Any) -> Any:
    """A JSON value with names in the place of paths, those in lists with commas too."""
    match value:
        case dict():
            return {key: with_names(item) for key, item in value.items()}
        case list():
            return [with_names(item) for item in value]
        case str():
            return ",".join(name_of(part) for part in value.split(","))
        case _:
            return value
