"""What the tests of whole engines share: their environments, new heads, and the records that the tests write into the
folder that DRAFTSMITH_ENGINE_RECORD names, eval/results/engines in the repository."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.measure.machine import machine
from eval.records.results import write_record
from eval.servers.engine_process import engine_python
from heads.registry import build_head
from heads.targets.frozen_target import FrozenTarget

VARIABLE = "DRAFTSMITH_ENGINE_RECORD"
SMALL: dict[str, Any] = {"num_layers": 2, "intermediate_size": 192}
EAGLE3: dict[str, Any] = {"draft_vocab_size": 2048, "intermediate_size": 384}
DRAFT: dict[str, Any] = {"layers": [0, 5, 10, 15, 19]}


def need(engine: str, *programs: str) -> Path:
    """Return the Python of an engine's environment. Skip the test where it or a program beside it is not there."""
    python = engine_python(engine)
    if python is None or not all((python.parent / program).exists() for program in programs):
        pytest.skip(f"no environment with {' and '.join((engine, *programs))} (scripts/make_engine.sh {engine})")
    return python


def new_head(kind: str, target: FrozenTarget, settings: dict[str, Any]) -> Any:
    """Return a head whose initial weights draft a few right tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_head(kind, settings, target, torch.ones(target.vocab_size))


def add_row(name: str, row: Mapping[str, object], facts: Mapping[str, object]) -> None:
    """Add a row to a record, in the place of the one of the same draft and engine."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    path = Path(folder) / f"{name}.json"
    kept = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows = [other for other in kept if (other["draft"], other["engine"]) != (row["draft"], row["engine"])]
    write_record({**machine(torch.device("cpu")), **facts, "rows": [*rows, row]}, path)
