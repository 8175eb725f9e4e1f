"""A recipe in a folder of its own, small enough that a whole run takes a second."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runs import forget_accelerator

TEXT = "the sea is near the trees and the stone is on the sand; there are ten birds in the den. "


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its state for the life of the process; every test begins without."""
    forget_accelerator()
    yield


@pytest.fixture
def fresh() -> Callable[[], None]:
    """Lets a test make several runs of settings of their own."""
    return forget_accelerator


@pytest.fixture
def settings(tmp_path: Path, tiny_target_dir: Path) -> dict[str, Any]:
    """The settings of a complete small run on a text file."""
    (tmp_path / "data.jsonl").write_text("".join(f'{{"text": "{TEXT[n:]}{TEXT[:n]}"}}\n' for n in range(0, 80, 5)))
    (tmp_path / "prompts.jsonl").write_text('{"text": "the sea is near"}\n{"text": "there are ten"}\n')
    return {
        "output_dir": str(tmp_path / "run"),
        "target": {"path": str(tiny_target_dir)},
        "head": {"kind": "medusa", "depth": 2, "tree_nodes": 0},
        "data": {"sources": [{"kind": "text", "path": str(tmp_path / "data.jsonl")}], "context_length": 48},
        "train": {
            "max_steps": 6,
            "batch_size": 2,
            "lr": 0.01,
            "precision": "fp32",
            "log_every": 2,
            "checkpoint_every": 2,
        },
        "eval": {"prompts": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 8, "tree": "chain:2"},
    }


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of tokenised data, and of answers, of the test's own."""
    monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(tree: dict[str, Any]) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    return write
