"""A sweep file is walked as wandb would walk it, a setting that fails takes no other with it, and nothing is measured
twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval import bench, sweep
from eval.core.command_line import exit_status
from eval.sweep import Sweep, bench_arguments
from tests.support.annotations import Capture, Patch
from tests.support.wandb_file import identity

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = sorted((ROOT / "recipes/sweeps").glob("*.yaml"))
GOOD: dict[str, Any] = {"program": "eval/bench.py", "method": "grid", "metric": {"name": "tau", "goal": "maximize"}}
GOOD["parameters"] = {"head": {"value": "lookup:2"}, "tree": {"values": ["chain:1", "chain:3"]}}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({**GOOD, **changes}, sort_keys=False))
    return file


def run(*words: object) -> int:
    return exit_status(lambda: sweep.main([str(word) for word in words]))


@pytest.mark.usefixtures("without_charts")
def test_a_grid_is_measured_sorted_and_resumed(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "x = 1, x = 1, x"}\n')
    values = {"target": str(tiny_target_dir), "prompts": str(tmp_path / "prompts.jsonl"), "repeats": 1}
    parameters = GOOD["parameters"] | {name: {"value": value} for name, value in values.items()}
    parameters["max_new_tokens"] = {"values": [24, 100_000]}  # the second has no room in the target's context
    calls: list[list[str]] = []
    main = bench.main
    monkeypatch.setattr(bench, "main", lambda arguments: calls.append(arguments) or main(arguments))  # type: ignore[func-returns-value]
    out = tmp_path / "out"
    words = write(tmp_path, parameters=parameters), "--out", out
    assert run(*words) == 2 and len(calls) == 4
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) < 12 and shown.err.count("  failed") == 2  # no report of each setting
    table = [line for line in shown.out.splitlines() if "tree=" in line]
    assert [("1 of 1" in line, "failed" in line) for line in table] == [(True, False)] * 2 + [(False, True)] * 2
    assert all("not measured: " in line or "x [" in line or "x " in line for line in table[:2])
    assert "leave no room" in shown.err
    rows = json.loads((out / "sweep.json").read_text())["rows"]
    taus = [row["figures"].get("tau") for row in rows]
    assert None not in taus[:2] and taus[0] >= taus[1] and taus[2:] == [None, None]

    (out / rows[1]["folder"] / "results.json").unlink()
    calls.clear()
    assert run(*words) == 2
    measured = {Path(word.removeprefix("--out=")).name for call in calls for word in call if "--out=" in word}
    assert measured == {row["folder"] for row in rows[1:]}

    options = bench.parse_arguments(bench_arguments(rows[0]["setting"]))
    before = bench.identity(options)
    assert rows[0]["folder"].endswith(before)
    (tmp_path / "prompts.jsonl").write_text('{"text": "other text, other text"}\n')
    assert bench.identity(options) != before, "other prompts are another measurement"


def test_an_output_that_is_not_the_targets_own_is_given_by_the_status(
    tmp_path: Path, monkeypatch: Patch, failed_results: Any
) -> None:
    def fail(arguments: list[str]) -> int:
        (out,) = (Path(word.removeprefix("--out=")) for word in arguments if word.startswith("--out="))
        out.mkdir(parents=True)
        (out / "results.json").write_text(json.dumps(failed_results))
        return 1

    monkeypatch.setattr(bench, "main", fail)
    for _ in range(2):  # the second time it is only read
        assert run(write(tmp_path), "--out", tmp_path / "out") == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "bayes"}, "method"),
    ({"program": "train/eagle.py"}, "program"),
    ({"metric": {"name": "taw", "goal": "maximize"}}, "metric.name"),
    ({"parameters": {"tree": "chain:5"}}, "parameters.tree"),
    ({"parameters": {"tree": {"value": "chain:5"}}}, "expected a head"),
    ({"parameters": {"head": {"value": "lookup:2"}, "trees": {"value": 1}}}, "--trees"),
]


def test_a_wrong_file_is_refused_in_one_line_before_anything_runs(tmp_path: Path, capsys: Capture) -> None:
    for changes, words in REFUSED:
        assert run(write(tmp_path, **changes), "--out", tmp_path / "out") == 2, changes
        error = capsys.readouterr().err
        assert words in error and len(error.splitlines()) == 1, (changes, error)
    for text in ("", "[1, 2]", "a: [", "method: grid\nprogram: eval/bench.py\nparameters: 3\n"):
        (tmp_path / "bad.yaml").write_text(text)
        assert run(tmp_path / "bad.yaml") == 2 and len(capsys.readouterr().err.splitlines()) == 1
    assert run(tmp_path / "none.yaml") == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_the_sweeps_that_come_with_it_are_run_by_wandb_as_by_us(path: Path) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    file = yaml.safe_load(path.read_text())
    assert file["command"] == ["${env}", "${interpreter}", "${program}", "--wandb=online", "${args_no_boolean_flags}"]
    parameters = Sweep.model_validate(file).parameters
    setting = {name: given["values"][-1] if "values" in given else given["value"] for name, given in parameters.items()}
    flags = create_sweep_command_args({"args": {name: {"value": value} for name, value in setting.items()}})
    assert bench_arguments(setting) == flags["args_no_boolean_flags"]
    options = bench.parse_arguments(bench_arguments(setting))
    assert options.trees == (setting["tree"],) and options.heads == [setting["head"]]


@pytest.mark.slow
def test_a_setting_becomes_a_wandb_run_on_disk(tiny_target_dir: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    empty = dict.fromkeys(("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_GROUP"), "")  # the sweep sets them
    for name, value in (empty | {"WANDB_MODE": "offline", "WANDB_DATA_DIR": str(tmp_path / "staged")}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "prompts.jsonl").write_text('{"text": "x = 1, x = 1, x"}\n')
    prompts = str(tmp_path / "prompts.jsonl")
    values = {"head": "lookup:2", "target": str(tiny_target_dir), "prompts": prompts, "repeats": 1}
    parameters = {"tree": {"values": ["chain:2"]}} | {name: {"value": value} for name, value in values.items()}
    assert run(write(tmp_path, parameters=parameters), "--out", tmp_path / "out", "--wandb", "offline") == 0
    (record,) = tmp_path.glob("out/*/wandb/offline-run-*")
    name, group, tags, config, _ = identity(record.parents[1])
    assert (name, group, tags) == ("tree=chain:2", "sweep", {"lookup", tiny_target_dir.name})
    assert (config["head"], config["repeats"], config["trees"]) == ("lookup:2", 1, ["chain:2"])
