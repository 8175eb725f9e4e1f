"""Models on the Hugging Face Hub: OWNER/NAME as it stands, or OWNER/NAME@REVISION, a branch, a tag or a commit."""

import re
from pathlib import Path

NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
PINNED = re.compile(rf"({NAME}/{NAME})@([A-Za-z0-9_][A-Za-z0-9_./-]*)")
MODEL = re.compile(rf"(?:{NAME}/)?{NAME}")
"""A few old models have no owner."""


def is_here(name: str) -> bool:
    """Whether there is a file or folder of that name; no for what cannot be a path at all, such as a name too long."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def repo_and_revision(name: str) -> tuple[str, str | None]:
    """What the Hub's functions take for a name; whatever is a folder here, or has no @ behind an id, stays whole."""
    pinned = PINNED.fullmatch(name)
    if pinned is None or is_here(name):
        return name, None
    return pinned[1], pinned[2]
