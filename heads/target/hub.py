"""Names of models on the Hugging Face Hub: OWNER/NAME, or OWNER/NAME@REVISION with a branch, a tag or a commit."""

import re
from pathlib import Path
from typing import Any

NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
PINNED = re.compile(rf"({NAME}/{NAME})@([A-Za-z0-9_][A-Za-z0-9_./-]*)")
MODEL = re.compile(rf"(?:{NAME}/)?{NAME}")
"""Names of models. A few old ones have no owner."""


def is_here(name: str) -> bool:
    """Return True if there is a file or folder with this name. Return False for names that cannot be paths, such as too
    long ones."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def repo_and_revision(name: str) -> tuple[str, str | None]:
    """Split a name into the Hub's repository and revision. Local folders and names without @ are not split."""
    pinned = PINNED.fullmatch(name)
    if pinned is None or is_here(name):
        return name, None
    return pinned[1], pinned[2]


def is_hub_id(name: str) -> bool:
    """Return True if a name is a valid Hub id OWNER/NAME, with or without @REVISION, and not a local folder."""
    repo, _ = repo_and_revision(name)
    whole = re.fullmatch(f"{NAME}/{NAME}", repo) is not None
    return whole and "--" not in repo and ".." not in repo and len(repo) <= 96 and not Path(name).exists()


def name_of(path: str) -> str:
    """Return a name that reveals nothing about this machine: a Hub id unchanged, or the last part of a path or URL."""
    return path if "/" not in path or is_hub_id(path) else path.partition("?")[0].rstrip("/").rpartition("/")[2]


def with_names(value: Any) -> Any:
    """Return a JSON value with its paths replaced with names (`name_of`), also in comma-separated lists."""
    match value:
        case dict():
            return {key: with_names(item) for key, item in value.items()}
        case list():
            return [with_names(item) for item in value]
        case str():
            return ",".join(name_of(part) for part in value.split(","))
        case _:
            return value
