"""Where a head comes from: command, code and versions, target and data."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eval.environment import device_facts, versions
from heads.target import FrozenTarget
from train.recipe import Recipe, plain_settings


def make_provenance(recipe: Recipe, target: FrozenTarget, data_hash: str, *, num_processes: int) -> dict[str, Any]:
    """What provenance.json and the head's own record say."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions(),
        "device": device_facts(target.device),
        "num_processes": num_processes,
        "target": {
            "path": target.name,
            "fingerprint": target.fingerprint,
            "dtype": str(target.dtype).removeprefix("torch."),
        },
        "data": {"sources": plain_settings(recipe)["data"], "sha256": data_hash},
    }
