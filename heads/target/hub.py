"""Models on the Hugging Face Hub: OWNER/NAME as it stands, or OWNER/NAME@REVISION, a branch, a tag or a commit."""

import re
from pathlib import Path

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
