"""A recipe in a folder of its own, small enough that a whole run takes a second."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from heads.targets.target_files import load_tokenizer
from tests.conftest import small_recipe
from tests.support.runs import forget_accelerator


@pytest.fixture(autouse=True)
def fresh_accelerator() -> None:
    """Accelerate keeps its state for the life of the process; every test begins without."""
    forget_accelerator()


@pytest.fixture
def settings(tmp_path: Path, tiny_target_dir: Path) -> dict[str, Any]:
    """The settings of a complete small run on a text file."""
    return small_recipe(tmp_path, tiny_target_dir)


@pytest.fixture
def small(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of an EAGLE-3 head that takes a second to train and to measure."""
    settings["head"] = {"kind": "eagle3", "depth": 2, "intermediate_size": 32}
    settings["train"] |= {"max_steps": 2, "log_every": 1}
    settings["eval"]["report"] = {"repeats": 1}
    return settings


@pytest.fixture(scope="session")
def target(tiny_target_dir: Path) -> FrozenTarget:
    return load_target(str(tiny_target_dir))


@pytest.fixture(scope="session")
def tokenizer(tiny_target_dir: Path) -> PreTrainedTokenizerBase:
    """The tiny target's, for tests that do not change it."""
    return load_tokenizer(str(tiny_target_dir))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of tokenised data, and of answers, of the test's own."""
    monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
