"""Run folders whose files say something odd: a run goes on, or is refused in one line; never a traceback."""

import json
import random
import shutil
from pathlib import Path

import pytest

from eval.command import exit_status
from heads.files import file_hash
from tests.faults import signal_at
from tests.mutations import damage_bytes, mutate
from tests.runs import Settings, WriteRecipe, train
from train.interrupts import Interrupted


@pytest.fixture
def stopped(settings: Settings, write_recipe: WriteRecipe) -> Path:
    """The recipe of a run that was asked to stop in the midst of an interval, measured once."""
    settings["train"] |= {"max_steps": 4, "eval_every": 2, "log_every": 4, "checkpoint_every": 100}
    recipe = write_recipe(settings)
    with signal_at(3), pytest.raises(Interrupted):
        train(recipe)
    assert (recipe.parent / "run/checkpoints/step-3").is_dir()
    return recipe


def harm(run: Path, rng: random.Random) -> None:
    """Change one file of a run; more often than not its checkpoint's manifest then says that it has to be so."""
    checkpoint = run / "checkpoints/step-3"
    file = rng.choice(
        [
            *[checkpoint / "state.json"] * 6,
            *(path for path in run.rglob("*") if path.is_file() and path.name != ".lock"),
        ]
    )
    if file.suffix == ".json" and rng.random() < 0.8:
        file.write_text(json.dumps(mutate(json.loads(file.read_text()), rng)))
    else:
        other = rng.choice(list(checkpoint.iterdir())).read_bytes()
        file.write_bytes(other if rng.random() < 0.25 else damage_bytes(file.read_bytes(), rng))
    if file.parent == checkpoint and file.name != "manifest.json" and rng.random() < 0.8:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest[file.name] = file_hash(file)
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    if rng.random() < 0.1:
        checkpoint.rename(checkpoint.with_name(rng.choice(["step-4", "step-9", "step-²", "step-0", "step-x"])))


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 120), marks=pytest.mark.slow)], ids=lambda seeds: f"{len(seeds)}"
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_run_state_is_a_traceback(seeds: range, stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stopped.parent / "run"
    shutil.copytree(run, stopped.parent / "sound")
    outcomes = []
    for seed in seeds:
        shutil.rmtree(run)
        shutil.copytree(stopped.parent / "sound", run)
        harm(run, random.Random(seed))
        capsys.readouterr()
        outcomes.append(exit_status(lambda: 0 * len(train(stopped))))
        said = capsys.readouterr().err
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert (outcomes[-1], len(errors)) in ((0, 0), (2, 1)), (seed, said)
        assert all(len(line) < 500 for line in errors), (seed, errors)
    assert {0, 2} == set(outcomes)
