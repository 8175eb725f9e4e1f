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

from eval import sweep
from eval.bench import parse_arguments as parse_bench
from eval.benchmark.results import read_results
from eval.benchmark.settings import to_settings
from eval.benchmark.sweep_file import COMMAND, Sweep, ranked, read_sweep
from eval.command import exit_status
from eval.commands.bench_run import bench_command
from eval.commands.sweep_run import best_line, place_of, run_sweep
from tests.wandb_file import identity, outcome

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = sorted((ROOT / "recipes/sweeps").glob("*.yaml"))
GOOD: dict[str, Any] = {
    "program": "eval/bench.py",
    "method": "grid",
    "metric": {"name": "tau", "goal": "maximize"},
    "parameters": {"head": {"value": "lookup:2"}, "tree": {"values": ["chain:1", "chain:3"]}},
    "command": list(COMMAND),
}


def write(folder: Path, **changes: Any) -> Path:
    """A sweep file; a change to None takes the key out."""
    file = folder / "sweep.yaml"
    kept = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    file.write_text(yaml.safe_dump(kept, sort_keys=False))
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
        words = command[command.index("eval/bench.py") + 1 :]
        with redirect_stdout(stdout), redirect_stderr(stdout):
            return SimpleNamespace(returncode=exit_status(lambda: bench_command(parse_bench(words))))

    return exit_status(lambda: run_sweep(sweep.parse_arguments([str(word) for word in words]), parse_bench, run))


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
    assert call(calls, *words) == 2
    assert len(calls) == 4
    shown = capsys.readouterr().out
    assert shown.count("1 of 1") == 2 and shown.count("failed") == 2 and "leave no room" in shown
    assert "\nbest: tree=chain:" in shown
    record = json.loads((out / "sweep.json").read_text())
    taus = [row["figures"].get("tau") for row in record["rows"]]
    assert None not in taus[:2] and taus[0] >= taus[1] and taus[2:] == [None, None]
    best = json.loads((out / record["rows"][0]["folder"] / "results.json").read_text())
    assert best["tau"]["mean"] == taus[0] and best["tree"] == record["rows"][0]["setting"]["tree"]
    with (out / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["tau"] for row in table] == [*(str(tau) for tau in taus[:2]), "", ""]

    calls.clear()
    (out / record["rows"][1]["folder"] / "results.json").write_text("{")  # cut short: as good as none
    assert call(calls, *words) == 2
    assert sorted(Path(command[-1].removeprefix("--out=")).name for command in calls) == sorted(
        row["folder"] for row in record["rows"][1:]
    )

    calls.clear()
    for row, mean in zip(record["rows"][:2], (9.0, 1.0), strict=True):
        file = out / row["folder"] / "results.json"
        results = json.loads(file.read_text())
        for m in (results, *results["measurements"]):
            m["baseline"] |= {"ms_per_token": mean, "token_ms": {"p50": 1.0, "p95": 1.0, "p99": 1.0}}
            m["speedup"] |= {"tokens": 640, "measured": 1.0, "ci95": [0.9, 1.1], "predicted": 1.0}
        file.write_text(json.dumps(results))
    capsys.readouterr()
    call(calls, *words)
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if "something else used this machine" in line]
    assert len(said) == 1 and f"(delete {out / record['rows'][0]['folder']})" in said[0]
    assert len([line for line in lines if "not measured" in line and "1 of 1" in line]) == 1
    with (out / "sweep.csv").open() as file:
        spread = [(row["tau_low"], row["speedup"], row["speedup_low"]) for row in csv.DictReader(file)]
    assert spread[0][1:] == ("", "") and spread[1][1] != ""

    calls.clear()
    parameters["max_new_tokens"] = {"values": [24]}
    (tmp_path / "prompts.jsonl").write_text('{"text": "other text, other text"}\n')
    assert call(calls, write(tmp_path, parameters=parameters), "--out", out) == 0
    assert len(calls) == 2, "other prompts are another measurement"


def test_an_output_that_is_not_the_targets_own_is_given_by_the_status(
    tmp_path: Path, calls: list[list[str]], capsys: pytest.CaptureFixture[str], failed_results: dict[str, Any]
) -> None:
    file, out = write(tmp_path), tmp_path / "out"
    found = read_sweep(file)
    for setting in found.settings():
        place = out / place_of(found, setting, parse_bench)
        place.mkdir(parents=True)
        (place / "results.json").write_text(json.dumps(failed_results))
    assert call(calls, file, "--out", out) == 1 and not calls
    assert "an output was not the target's own" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": "grid"}, "unknown key 'methods'; did you mean method?"),
        ({"early_terminate": {"type": "hyperband"}}, "unknown key 'early_terminate'"),
        ({"method": None}, "lacks method"),
        ({"method": "gird"}, "method: expected grid, random or bayes"),
        ({"method": "bayes"}, "needs a server"),
        ({"method": "random"}, "give run_cap or --count"),
        ({"method": "random", "run_cap": 3, "parameters": {"top_p": {"min": 0.5, "max": 1}}}, "use --wandb online"),
        ({"program": "train/eagle.py"}, "program: expected eval/bench.py"),
        ({"program": "elsewhere/eval/bench.py"}, "no elsewhere/eval/bench.py here"),
        ({"name": 3}, "name: expected text, got 3"),
        ({"run_cap": 0}, "run_cap: expected a whole number"),
        ({"metric": {"name": "tau"}}, "metric: expected a name and a goal"),
        ({"metric": {"name": "taw", "goal": "maximize"}}, "metric: expected tau, speedup"),
        ({"parameters": {}}, "parameters: expected options"),
        ({"parameters": {"tree": "chain:5"}}, "parameters.tree: expected value or values"),
        ({"parameters": {"tree": {"values": []}}}, "parameters.tree: values: expected a list"),
        ({"parameters": {"top_p": {"min": 0.5, "max": 1}}}, "parameters.top_p: a server draws from min, max"),
        ({"parameters": {"out": {"value": "x"}}}, "parameters.out: every setting has a folder"),
        ({"parameters": {"tree": {"value": "chain:5"}}}, "expected a head"),
        ({"parameters": {"head": {"value": "runs/none"}}}, "runs/none"),
        ({"parameters": {"head": {"value": "lookup:2"}, "tree": {"values": ["chain:2", "chian:2"]}}}, "chian:2"),
        ({"parameters": {"head": {"value": "lookup:2"}, "trees": {"value": 1}}}, "--trees"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_before_anything_runs(
    changes: dict[str, Any], said: str, tmp_path: Path, calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(calls, write(tmp_path, **changes), "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
    assert not calls and not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "method: grid\nprogram: eval/bench.py\nparameters: 3\n"])
def test_what_is_no_sweep_file_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], calls: list[list[str]]
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert call(calls, tmp_path / "bad.yaml") == 2 and call(calls, tmp_path / "none.yaml") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_wandb_is_promised_only_where_it_will_hear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], calls: list[list[str]]
) -> None:
    assert call(calls, write(tmp_path, command=None), "--wandb", "online") == 2
    assert "wandb hears of nothing" in capsys.readouterr().err and not calls


def test_random_settings_are_those_of_the_seed_and_all_different(tmp_path: Path) -> None:
    parameters = {
        "head": {"value": "lookup:2"},
        "tree": {"values": ["chain:2", "chain:3"]},
        "batch_size": {"values": list(range(1, 9))},
        "top_k": {"values": list(range(100))},
    }
    found = read_sweep(write(tmp_path, method="random", parameters=parameters, run_cap=200))
    settings = found.settings(seed=3)
    assert settings == found.settings(seed=3) != found.settings(seed=4)
    assert len({repr(setting) for setting in settings}) == 200 and len(found.settings(5)) == 5
    assert {setting["batch_size"] for setting in settings} == set(range(1, 9))
    small = read_sweep(write(tmp_path, method="random", run_cap=10))
    assert sorted(setting["tree"] for setting in small.settings()) == ["chain:1", "chain:3"]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("speedup", "best: tree=chain:1: speedup 1.50x [1.40, 1.60], tau 2.00"),
        ("tau", "best: tree=chain:3: tau 3.00 [2.00, 4.00], speedup not measured"),
        ("alpha_1", "best: none, since no setting has a reliable alpha_1"),
    ],
)
def test_the_best_line_is_of_reliable_figures(metric: str, expected: str, tmp_path: Path) -> None:
    found = read_sweep(write(tmp_path, metric={"name": metric, "goal": "maximize"}))
    slow = {"tau": 2.0, "speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6}
    busy = {"tau": 3.0, "tau_low": 2.0, "tau_high": 4.0, "speedup": None}
    rows = [
        {"setting": setting, "figures": figures}
        for setting, figures in zip(found.settings(), (slow, busy), strict=True)
    ]
    assert best_line(found, rows) == expected


def test_rows_without_the_metric_come_last(tmp_path: Path) -> None:
    found = read_sweep(write(tmp_path, metric={"name": "ms_per_round", "goal": "minimize"}))
    rows = [{"figures": {"ms_per_round": value}} for value in (3.0, None, 1.0)] + [{"figures": {}}]
    assert ranked(rows, found) == [rows[2], rows[0], rows[1], rows[3]]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_the_sweeps_that_come_with_it_are_understood_by_us_and_run_by_wandb_as_by_us(path: Path) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    found: Sweep = read_sweep(path)
    settings = found.settings()
    assert len(settings) > 1
    for setting in settings:
        flags = create_sweep_command_args({"args": {name: {"value": value} for name, value in setting.items()}})
        assert found.arguments(setting) == flags["args_no_boolean_flags"] and found.command == list(COMMAND)
        options = parse_bench(found.arguments(setting))
        assert to_settings(options).trees == (setting["tree"],) and options.heads == [setting["head"]]


@pytest.mark.slow
def test_a_setting_is_a_process_and_becomes_a_wandb_run_on_disk(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    (tmp_path / "prompts.jsonl").write_text('{"text": "x = 1, x = 1, x"}\n')
    values = {"head": "lookup:2", "target": str(tiny_target_dir), "prompts": str(tmp_path / "prompts.jsonl")}
    parameters = {
        name: {"value": value} for name, value in {**values, "tree": "chain:2", "temperature": 0, "repeats": 1}.items()
    }
    words = [str(write(tmp_path, parameters=parameters)), "--out", str(tmp_path / "out"), "--wandb", "offline"]
    assert exit_status(lambda: sweep.main(words)) == 0
    (record,) = tmp_path.glob("out/*/wandb/offline-run-*")
    said = capsys.readouterr().err
    assert f"wandb sync {tmp_path}/out/*/wandb/offline-run-*" in said
    (folder,) = (file.parent for file in tmp_path.glob("out/*/results.json"))
    log = (folder / "log.txt").read_text()
    assert Path(log.splitlines()[-1].partition("wandb sync ")[2]).resolve() == record.resolve(), log
    results, (logged, models, code) = read_results(folder / "results.json"), outcome(folder)
    assert logged["tau"] == results["tau"]["mean"]
    assert ("speedup" in logged) == ("tokens_per_second" in logged) == results["speedup"]["reliable"]
    assert logged["measurements/nrows"] == 1 and logged["plots/acceptance/_type"] == "image-file"
    assert not models and code == 0
    name, group, tags, config, charted = identity(folder)
    text = read_sweep(tmp_path / "sweep.yaml").text({**values, "tree": "chain:2", "temperature": 0, "repeats": 1})
    assert (name, group, tags) == (text, "sweep", {"lookup", tiny_target_dir.name})
    assert (config["temperature"], config["repeats"], config["tree"]) == (0, 1, "chain:2")
    assert not charted & {"tau", "speedup", "alpha_1"} and "report" in charted
