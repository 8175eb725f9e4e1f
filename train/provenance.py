"""Where a head comes from: versions, commit, command, target and data."""

import importlib.metadata
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from heads.target import FrozenTarget
from train.recipe import Recipe, plain_settings

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "safetensors", "tokenizers", "numpy")


def make_provenance(recipe: Recipe, target: FrozenTarget, data_hash: str, *, num_processes: int) -> dict[str, Any]:
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": read_commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "device": str(target.device),
        "num_processes": num_processes,
        "target": {
            "path": target.name,
            "fingerprint": target.fingerprint,
            "dtype": str(target.dtype).removeprefix("torch."),
        },
        "data": {"sources": plain_settings(recipe)["data"], "sha256": data_hash},
    }


def read_commit() -> str | None:
    """The commit of this code, with `+changes` if tracked files differ from it; None outside git."""
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if commit and git("status", "--porcelain", "--untracked-files=no") else commit
