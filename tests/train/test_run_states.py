"""Run folders whose files say something odd: a run goes on, or is refused in one line; never a traceback."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from eval.command import exit_status
from heads.checkpoint import file_hash
from tests.faults import signal_at
from tests.runs import Settings, WriteRecipe, train
from train.interrupts import Interrupted

ODD: list[Any] = [
    *(None, True, "", "3", "\0", "ü" * 9999, [], [1], [[]], {}, {"": 0}),
    *(-1, 0, 1, 2, 0.5, 10**15, 10**400, 1e308, -1e-320, float("nan"), float("inf")),
]


@pytest.fixture
def stopped(settings: Settings, write_recipe: WriteRecipe) -> Path:
    """The recipe of a run that was asked to stop in the midst of an interval, measured once."""
    settings["train"] |= {"max_steps": 4, "eval_every": 2, "log_every": 4, "checkpoint_every": 100}
    recipe = write_recipe(settings)
    with signal_at(3), pytest.raises(Interrupted):
        train(recipe)
    assert (recipe.parent / "run/checkpoints/step-3").is_dir()
    return recipe


def places(tree: Any, key: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of a nested value, its own, (), first."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [key, *(place for name, value in inside for place in places(value, (*key, name)))]


def mutate(tree: Any, rng: random.Random) -> Any:
    """The tree with one value changed, dropped or added."""
    place = rng.choice(places(tree))
    if not place:
        return rng.choice(ODD) if rng.random() < 0.3 else {**tree, "more": rng.choice(ODD)}
    section = tree
    for name in place[:-1]:
        section = section[name]
    if rng.random() < 0.2:
        del section[place[-1]]
    elif rng.random() < 0.2 and type(section[place[-1]]) in (int, float):
        section[place[-1]] += rng.choice((-1, 1))
    else:
        section[place[-1]] = rng.choice(ODD)
    return tree


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
        data = bytearray(file.read_bytes())
        match rng.randrange(4):
            case 0:
                data = data[: rng.randrange(len(data) + 1)]
            case 1:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 2:
                data = bytearray(rng.choice([path for path in checkpoint.iterdir()]).read_bytes())
            case 3:
                data[rng.randrange(len(data)) :] = b"\xff\0]}"
        file.write_bytes(data)
    if file.parent == checkpoint and file.name != "manifest.json" and rng.random() < 0.8:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest[file.name] = {"bytes": file.stat().st_size, "sha256": file_hash(file)}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    if rng.random() < 0.1:
        checkpoint.rename(checkpoint.with_name(rng.choice(["step-4", "step-9", "step-²", "step-0", "step-x"])))


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 500), marks=pytest.mark.slow)], ids=lambda seeds: f"{len(seeds)}"
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
