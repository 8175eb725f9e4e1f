"""Exit status and one clear line for everything a user can mend; nothing is written then."""

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets.utils._filelock import FileLock
from safetensors.torch import load_file

from eval.pages.wandb_run import run_place, wandb_mode
from heads.core.errors import warn_once
from tests.support.annotations import Capture, Patch
from tests.support.faults import signal_at
from tests.support.refusals import refused
from tests.support.runs import Settings, lines, measured_run, write_recipe
from tests.support.wandb_file import identity, outcome
from train.entry import attempt
from train.plan.memory_and_flops import Launch, Plan
from train.recipe.recipe import load_recipe


def test_a_whole_run_leaves_everything_and_is_not_made_again(small: Settings, capsys: Capture) -> None:
    folder, results = measured_run("eagle", small)
    for name in ("recipe.yaml", "provenance.json", "metrics.jsonl", "results.json", "report.html", "head/config.json"):
        assert (folder / name).is_file(), name
    assert "d2t" not in load_file(folder / "head/model.safetensors")  # the target's whole vocabulary needs no table
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["target"]["path"] == small["target"]["path"]
    disk = Plan(load_recipe(write_recipe(small)), Launch()).disk()
    sizes = [sum(file.stat().st_size for file in (folder / name).rglob("*")) for name in ("checkpoints/step-2", "head")]
    assert [*disk.values()] == pytest.approx([3 * sizes[0], 2 * sizes[1]], rel=0.2)
    assert load_recipe(folder / "recipe.yaml").head.aux_layer_ids == (2, 4, 5)
    assert results["head"]["budget_tokens"] == max(point["tokens"] for point in lines(folder, "train"))
    assert results["head"]["data_sha256"] == provenance["data"]["sha256"]
    capsys.readouterr()
    assert attempt("eagle", [str(write_recipe(small))]) == 0
    said = capsys.readouterr().err
    assert "finished already" in said and "measured already" in said


@pytest.mark.parametrize(
    ("recipe", "variable", "mode"),
    [
        *(("online", "disabled", "off"), ("online", "offline", "offline"), ("offline", "run", "online")),
        *(("online", "", "online"), ("off", "online", "off")),
    ],
)
def test_the_variable_of_a_cluster_wins_over_a_recipe_that_asks_for_wandb(
    recipe: str, variable: str, mode: str, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    assert wandb_mode(recipe) == mode
    monkeypatch.setenv("WANDB_MODE", "wrong")
    if recipe != "off":
        assert "WANDB_MODE: expected one of online, " in refused(wandb_mode, recipe)


def test_the_command_that_uploads_names_every_part_of_a_run_in_order(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    parts = [tmp_path / f"wandb/offline-run-20261128_1{hour}0000-x1" for hour in (1, 0, 2)]
    for part in (*parts, tmp_path / "wandb/offline-run-20261128_130000-y2"):
        part.mkdir(parents=True)
    named = [f"wandb/offline-run-20261128_1{hour}0000-x1" for hour in (0, 1, 2)]
    run = SimpleNamespace(offline=True, id="x1", sync_dir=str(parts[2]))
    assert run_place(run) == f"wandb: offline; upload the run with: wandb sync {' '.join(named)}"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EACCES])
def test_a_file_system_without_locks_is_no_folder_in_use(
    number: int, small: Settings, own_cache: Path, monkeypatch: Patch, capsys: Any, caplog: Any
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    warn_once.cache_clear()
    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr("datasets.builder.FileLock", FileLock)
    small["data"]["regenerate"] = {"prompts": 2, "new_tokens": 8, "prompt_tokens": 16}
    status = attempt("eagle", [str(write_recipe(small))])
    warnings = [record.message for record in caplog.records if "has no locks" in record.message]
    if number == errno.EACCES:
        assert status == 2 and not warnings and "in use by another process" in capsys.readouterr().err
    else:
        assert status == 0 and len(warnings) == 1 and os.strerror(number) in warnings[0]


@pytest.mark.slow
def test_wandb_holds_the_outcome_and_no_key(
    small: Settings, tmp_path: Path, monkeypatch: Patch, capfd: Capture
) -> None:
    key = "5ec2e7" * 7
    for name in ("DATA", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", "offline")
    small["tracking"] = {"project": "test"}
    assert attempt("eagle", [str(write_recipe(small)), "--wandb", "online"]) == 0
    folder = Path(small["output_dir"])
    results = json.loads((folder / "results.json").read_text())
    values, artifacts, code = outcome(folder)
    for _ in range(40):  # on a busy machine wandb's own process ends some seconds later
        if code is None:
            time.sleep(0.5)
            values, artifacts, code = outcome(folder)
    assert code == 0 and values["train/loss"] > 0 and values["eval/tau"] > 0
    assert values["tau"] == results["tau"]["mean"] and results["speedup"]["tokens"] < 64
    assert not {"speedup", "tokens_per_second"} & values.keys() and results["speedup"]["reliable"] is False
    assert (values["prompts"], values["divergences"]) == (2, 0)
    assert values["measurements/_type"] == "table-file" and values["measurements/nrows"] == 1
    drawn = {file.stem for file in folder.glob("plots/*.png")}
    assert drawn and {name.split("/")[1] for name in values if name.startswith("plots/")} == drawn
    name, _, tags, config, charted = identity(folder)
    assert (name, tags) == ("run", {"eagle3", Path(small["target"]["path"]).name}) and config["train"]["max_steps"] == 2
    assert not charted & {"tau", "speedup", "alpha_1"}
    assert {"report", "train/accuracy_1", "eval/tau"} <= charted
    (held,) = artifacts.values()
    assert sorted(held) == sorted(path.name for path in (folder / "head").iterdir())
    said = "".join(capfd.readouterr())
    assert key not in said
    (command,) = [line for line in said.splitlines() if "wandb sync " in line]
    assert list(Path(command.partition("wandb sync ")[2]).glob("*.wandb"))
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert not leaks


def test_an_interrupt_is_status_130_with_a_checkpoint(small: Settings, capsys: Capture) -> None:
    with signal_at(1):
        assert attempt("eagle", [str(write_recipe(small))]) == 130
    assert (Path(small["output_dir"]) / "checkpoints/step-1/manifest.json").is_file()
    assert "interrupted at step 1; the same command goes on from there" in capsys.readouterr().err


def test_no_recipe_is_a_usage_line(capsys: Capture) -> None:
    assert attempt("eagle", []) == 2
    assert " train/eagle.py RECIPE.yaml" in capsys.readouterr().err
