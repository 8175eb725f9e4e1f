"""A sweep file is walked as wandb would walk it, a setting that fails takes no other with it, and nothing is measured
twice."""

import csv
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import yaml

from eval import bench, sweep
from eval.measure.command import exit_status
from eval.measure.results import read_results
from eval.sweep import Metric, Sweep, bench_arguments, best_line, place_of, rank, read_sweep
from tests.wandb_file import identity, outcome

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = sorted((ROOT / "recipes/sweeps").glob("*.yaml"))
GOOD: dict[str, Any] = {
    "program": "eval/bench.py",
    "method": "grid",
    "metric": {"name": "tau", "goal": "maximize"},
    "parameters": {"head": {"value": "lookup:2"}, "tree": {"values": ["chain:1", "chain:3"]}},
}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({**GOOD, **changes}, sort_keys=False))
    return file


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that sweeps start."""
    monkeypatch.chdir(ROOT)
    return []


def call(calls: list[list[str]], *words: object) -> int:
    """Sweep; the program runs in this process, whose imports are done."""

    def run(command: list[str], *, stdout: IO[str], stderr: int, env: dict[str, str]) -> SimpleNamespace:
        calls.append(command)
        with redirect_stdout(stdout), redirect_stderr(stdout):
            return SimpleNamespace(returncode=exit_status(lambda: bench.main(command[2:])))

    return exit_status(lambda: sweep.main([str(word) for word in words], run))


@pytest.mark.usefixtures("without_charts")
def test_a_grid_is_measured_sorted_and_gone_on_with(
    tiny_target_dir: Path, tmp_path: Path, calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "x = 1, x = 1, x"}\n')
    parameters = {
        **GOOD["parameters"],
        "target": {"value": str(tiny_target_dir)},
        "prompts": {"value": str(tmp_path / "prompts.jsonl")},
        "max_new_tokens": {"values": [24, 100_000]},  # the second has no room in the target's context
        "repeats": {"value": 1},
    }
    out = tmp_path / "out"
    words = write(tmp_path, parameters=parameters), "--out", out
    assert call(calls, *words) == 2 and len(calls) == 4
    shown = capsys.readouterr().out
    assert shown.count("1 of 1") == 2 and shown.count("failed") == 2 and "leave no room" in shown
    assert "\nbest: tree=chain:" in shown
    record = json.loads((out / "sweep.json").read_text())
    taus = [row["figures"].get("tau") for row in record["rows"]]
    assert None not in taus[:2] and taus[0] >= taus[1] and taus[2:] == [None, None]
    with (out / "sweep.csv").open() as file:
        assert [row["tau"] for row in csv.DictReader(file)] == [*(str(tau) for tau in taus[:2]), "", ""]

    calls.clear()
    (out / record["rows"][1]["folder"] / "results.json").write_text("{")  # cut short: as good as none
    assert call(calls, *words) == 2
    measured = {Path(word.removeprefix("--out=")).name for command in calls for word in command if "--out=" in word}
    assert measured == {row["folder"] for row in record["rows"][1:]}

    found = read_sweep(words[0])
    setting = found.settings(None, 0)[0]
    before = place_of(found, setting)
    (tmp_path / "prompts.jsonl").write_text('{"text": "other text, other text"}\n')
    assert (out / before).is_dir() and place_of(found, setting) != before, "other prompts are another measurement"


def test_an_output_that_is_not_the_targets_own_is_given_by_the_status(
    tmp_path: Path, calls: list[list[str]], capsys: pytest.CaptureFixture[str], failed_results: dict[str, Any]
) -> None:
    file, out = write(tmp_path), tmp_path / "out"
    found = read_sweep(file)
    for setting in found.settings(None, 0):
        place = out / place_of(found, setting)
        place.mkdir(parents=True)
        (place / "results.json").write_text(json.dumps(failed_results))
    assert call(calls, file, "--out", out) == 1 and not calls
    assert "an output was not the target's own" in capsys.readouterr().out


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "bayes"}, "needs a server"),
    ({"method": "random"}, "run_cap"),
    ({"program": "train/eagle.py"}, "program"),
    ({"metric": {"name": "taw", "goal": "maximize"}}, "metric.name"),
    ({"parameters": {"tree": "chain:5"}}, "parameters.tree"),
    ({"parameters": {"out": {"value": "x"}}}, "parameters.out"),
    ({"parameters": {"tree": {"value": "chain:5"}}}, "expected a head"),
    ({"parameters": {"head": {"value": "runs/none"}}}, "runs/none"),
    ({"parameters": {"head": {"value": "lookup:2"}, "trees": {"value": 1}}}, "--trees"),
]


def test_a_wrong_file_is_refused_in_one_line_before_anything_runs(
    tmp_path: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for changes, said in REFUSED:
        assert call(calls, write(tmp_path, **changes), "--out", tmp_path / "out") == 2, changes
        error = capsys.readouterr().err
        assert said in error and len(error.splitlines()) == 1, (changes, error)
    for text in ("", "[1, 2]", "a: [", "method: grid\nprogram: eval/bench.py\nparameters: 3\n"):
        (tmp_path / "bad.yaml").write_text(text)
        assert call(calls, tmp_path / "bad.yaml") == 2 and len(capsys.readouterr().err.splitlines()) == 1
    assert call(calls, tmp_path / "none.yaml") == 2
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert call(calls, write(tmp_path), "--wandb", "online") == 2
    assert "expected --wandb=online in it" in capsys.readouterr().err
    assert not calls and not (tmp_path / "out").exists()


def test_random_settings_are_those_of_the_seed_and_all_different(tmp_path: Path) -> None:
    parameters = {"tree": {"values": ["chain:2", "chain:3"]}, "top_k": {"values": list(range(800))}}
    found = Sweep(**{**GOOD, "method": "random", "parameters": parameters, "run_cap": 200})
    settings = found.settings(None, 3)
    assert settings == found.settings(None, 3) != found.settings(None, 4)
    assert len({repr(setting) for setting in settings}) == 200 and len(found.settings(5, 0)) == 5
    small = Sweep(**{**GOOD, "method": "random", "run_cap": 10})
    assert sorted(setting["tree"] for setting in small.settings(None, 0)) == ["chain:1", "chain:3"]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("speedup", "best: tree=chain:1: speedup 1.50x [1.40, 1.60], tau 2.00"),
        ("tau", "best: tree=chain:3: tau 3.00 [2.00, 4.00], speedup not measured"),
        ("alpha_1", "best: none, since no setting has a reliable alpha_1"),
    ],
)
def test_the_best_is_of_reliable_figures_and_rows_without_the_metric_come_last(metric: str, expected: str) -> None:
    found = Sweep(**{**GOOD, "metric": {"name": metric, "goal": "maximize"}})
    slow = {"tau": 2.0, "speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6}
    busy = {"tau": 3.0, "tau_low": 2.0, "tau_high": 4.0, "speedup": None}
    rows = [{"setting": s, "figures": f} for s, f in zip(found.settings(None, 0), (slow, busy), strict=True)]
    assert best_line(found, sorted(rows, key=lambda row: rank(row, found.metric))) == expected
    least = Metric(name="ms_per_round", goal="minimize")
    times = [{"figures": {"ms_per_round": value}} for value in (3.0, None, 1.0)]
    assert sorted(times, key=lambda row: rank(row, least)) == [times[2], times[0], times[1]]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_the_sweeps_that_come_with_it_are_run_by_wandb_as_by_us(path: Path) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    found = read_sweep(path)
    settings = found.settings(None, 0)
    assert len(settings) > 1
    assert found.command == ["${env}", "${interpreter}", "${program}", "--wandb=online", "${args_no_boolean_flags}"]
    for setting in settings:
        flags = create_sweep_command_args({"args": {name: {"value": value} for name, value in setting.items()}})
        assert bench_arguments(setting) == flags["args_no_boolean_flags"]
        options = bench.parse_arguments(bench_arguments(setting))
        assert options.trees == (setting["tree"],) and options.heads == [setting["head"]]


@pytest.mark.slow
def test_a_setting_is_a_process_and_becomes_a_wandb_run_on_disk(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    (tmp_path / "prompts.jsonl").write_text('{"text": "x = 1, x = 1, x"}\n')
    values = {"head": "lookup:2", "target": str(tiny_target_dir), "prompts": str(tmp_path / "prompts.jsonl")}
    values |= {"tree": "chain:2", "repeats": "1"}
    file = write(tmp_path, parameters={name: {"value": value} for name, value in values.items()})
    assert exit_status(lambda: sweep.main([str(file), "--out", str(tmp_path / "out"), "--wandb", "offline"])) == 0
    (record,) = tmp_path.glob("out/*/wandb/offline-run-*")
    assert f"wandb sync {tmp_path}/out/*/wandb/offline-run-*" in capsys.readouterr().err
    folder = record.parents[1]
    assert f"wandb sync {record}" in (folder / "log.txt").read_text()
    results, (logged, models, code) = read_results(folder / "results.json"), outcome(folder)
    assert logged["tau"] == results["tau"]["mean"]
    assert ("speedup" in logged) == ("tokens_per_second" in logged) == results["speedup"]["reliable"]
    assert not models and code == 0
    name, group, tags, config, _ = identity(folder)
    assert (name, group, tags) == (read_sweep(file).text(values), "sweep", {"lookup", tiny_target_dir.name})
    assert (config["head"], config["repeats"], config["trees"]) == ("lookup:2", 1, ["chain:2"])
