"""Names of models on the Hugging Face Hub: OWNER/NAME, or OWNER/NAME@REVISION with a branch, a tag or a commit."""

import re
from pathlib import Path
from typing import Any

NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
PINNED = re.compile(rf"({NAME}/{NAME})@([A-Za-z0-9_][A-Za-z0-9_./-]*)")
MODEL = re.compile(rf"(?:{NAME}/)?{NAME}")
"""Names of models, with or without an owner. A few old models have none."""


def is_here(name: str) -> bool:
    """Return True if a file or folder `name` exists. Return False for a name that cannot be a path, such as one that is
    too long."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def repo_and_revision(name: str) -> tuple[str, str | None]:
    """Return the repository and the revision of a name. For a local folder, and for a name without @, return the name
    and None."""
    pinned = PINNED.fullmatch(name)
    if pinned is None or is_here(name):
        return name, None
    return pinned[1], pinned[2]


def is_hub_id(name: str) -> bool:
    """Return True for an OWNER/NAME that is valid on the Hub, with or without @REVISION, unless it exists locally."""
    repo, _ = repo_and_revision(name)
    whole = re.fullmatch(f"{NAME}/{NAME}", repo) is not None
    return whole and "--" not in repo and ".." not in repo and len(repo) <= 96 and not Path(name).exists()


def name_of(path: str) -> str:
    """Return a name that reveals nothing of this machine: the last part of a path or URL. A Hub id is unchanged."""
    return path if "/" not in path or is_hub_id(path) else path.partition("?")[0].rstrip("/").rpartition("/")[2]


def with_names(value: Any) -> Any:
    """Return a JSON value with paths replaced by names, including paths in comma-separated strings."""
    match value:
        case dict():
            return {key: with_names(item) for key, item in value.items()}
        case list():
            return [with_names(item) for item in value]
        case str():
            return ",".join(name_of(part) for part in value.split(","))
        case _:
            return value
