"""Records of whole engines, which their tests write into the folder that DRAFTSMITH_ENGINE_RECORD names:
eval/results/engines in the repository."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from eval.measure.machine import machine
from eval.records.results import write_record

VARIABLE = "DRAFTSMITH_ENGINE_RECORD"


def add_row(name: str, row: Mapping[str, object], facts: Mapping[str, object]) -> None:
    """Add a row to a record, in the place of the one of the same draft and engine."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    path = Path(folder) / f"{name}.json"
    kept = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows = [other for other in kept if (other["draft"], other["engine"]) != (row["draft"], row["engine"])]
    write_record({**machine(torch.device("cpu")), **facts, "rows": [*rows, row]}, path)
