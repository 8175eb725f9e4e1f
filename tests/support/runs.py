"""Training runs of small recipes, and their files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from train.entry import attempt
from train.recipe.recipe import load_recipe
from train.run.open_run import open_run
from train.run.training_loop import Outcome, fit

Settings = dict[str, Any]
BLOCK: dict[str, Any] = {"block_size": 4, "num_layers": 2, "num_anchors": 8, "mask_token_id": 5}
"""Settings of a small head that drafts a block."""


def forget_accelerator() -> None:
    """Reset Accelerate's state, which otherwise lasts as long as the process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def write_recipe(settings: Settings) -> Path:
    """Write a recipe beside its output folder."""
    path = Path(f"{settings['output_dir']}.yaml")
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def train(recipe: Path, *overrides: str) -> Outcome:
    """Make a whole run without its final measurement."""
    forget_accelerator()
    read = load_recipe(recipe, overrides)
    with open_run(read) as run:
        return fit(read, run)


def train_in(settings: Settings) -> Path:
    """Make a whole run without its final measurement, and return its folder."""
    return Path(train(write_recipe(settings)).recipe.output_dir)


def weights(run: Path, step: int, name: str = "head") -> dict[str, Tensor]:
    """Return copies of a checkpoint's tensors, since a test may change the file."""
    return {
        key: tensor.clone() for key, tensor in load_file(run / f"checkpoints/step-{step}/{name}.safetensors").items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def measured_run(name: str, settings: Settings) -> tuple[Path, dict[str, Any]]:
    """Make a whole run of train/NAME.py, and return its folder and results. All outputs must be the target's own. Its
    charts are left out, since they take as long as the run."""
    forget_accelerator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.pages.charts.head_charts", lambda *_: [])
        patch.setattr("eval.pages.training_charts.training_charts", lambda *_: [])
        assert attempt(name, [str(write_recipe(settings))]) == 0
    folder = Path(settings["output_dir"])
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert results["exact"]["identical"] == results["exact"]["prompts"] > 0
    return folder, results


def lines(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, all of them or those of one kind."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def the_error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line
