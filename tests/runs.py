"""Training runs of small recipes, and what they leave."""

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eval.runtime.engine import Engine, EngineOptions, Request
from heads.base import shape_for
from heads.target.frozen import FrozenTarget
from train.entry import attempt
from train.loop import Outcome, fit
from train.opening import open_run
from train.recipe import load_recipe

Settings = dict[str, Any]
WriteRecipe = Callable[[Settings], Path]


def forget_accelerator() -> None:
    """Reset the state that Accelerate keeps for the life of the process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def train(recipe: Path, *overrides: str) -> Outcome:
    """A whole run, without the measurement that ends it."""
    read = load_recipe(recipe, overrides)
    with open_run(read) as run:
        return fit(read, run)


def train_in(settings: Settings, write_recipe: WriteRecipe) -> Path:
    """The folder of a whole run."""
    return Path(train(write_recipe(settings)).recipe.output_dir)


def weights(run: Path, step: int, name: str = "head") -> dict[str, Tensor]:
    """The tensors of a checkpoint, in memory of their own: a test may change the file."""
    return {
        key: tensor.clone() for key, tensor in load_file(run / f"checkpoints/step-{step}/{name}.safetensors").items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def measured_run(name: str, settings: Settings, write_recipe: WriteRecipe) -> tuple[Path, dict[str, Any]]:
    """The folder and the results of a whole run of train/NAME.py, all of whose output was the target's own."""
    assert attempt(name, [str(write_recipe(settings))]) == 0
    folder = Path(settings["output_dir"])
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert results["exact"]["identical"] == results["exact"]["prompts"] > 0
    return folder, results


def lines(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's record, all or of one kind."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def the_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of error that was printed."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def audit(
    target: FrozenTarget,
    head: Any,
    requests: list[Request],
    trees: Sequence[str],
    *,
    batch_sizes: Sequence[int] = (1, 8),
    max_length: int = 64,
    adaptive: Sequence[str] = (),
) -> None:
    """Decode with drafts of each tree, and adaptively with those of `adaptive`: every output is plain decoding's, and
    some drafted tokens came out."""
    plain = [output.tokens for output in Engine(target, None, EngineOptions(max_length=max_length)).generate(requests)]
    drafted = 0
    cases = [*((tree, False) for tree in trees), *((tree, True) for tree in adaptive)]
    for batch_size, (tree, adapts) in product(batch_sizes, cases):
        shape = shape_for(tree, head)
        options = EngineOptions(shape=shape, batch_size=batch_size, max_length=max_length, adaptive=adapts)
        outputs = Engine(target, head, options).generate(requests)
        assert [output.tokens for output in outputs] == plain, (tree, batch_size)
        drafted += sum(sum(output.accepted) for output in outputs)
    assert drafted > 0, "an audit in which nothing drafted came out proves little"
