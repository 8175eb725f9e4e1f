"""Every measurement keeps its folder, and the newest is found without its name."""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eval import report
from eval.core.command_line import exit_status
from eval.records.measure_settings import BenchSettings
from eval.records.result_folders import folders_of, measurement_name, newest_results, own_folder
from heads.core.errors import UserError
from tests.support.annotations import Capture, Patch

OPTIONS = argparse.Namespace(out=None, dtype="auto", quantize=None)


def test_measurements_of_one_second_and_one_setting_get_folders_of_their_own(tmp_path: Path) -> None:
    parent = tmp_path / "runs/x/bench"

    def take(n: int) -> Path:
        with own_folder(parent, BenchSettings(), OPTIONS, {}) as (folder, _):
            (folder / "results.json").write_text(str(n))
        return folder

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(take, range(12)))
    assert [(folder / "results.json").read_text() for folder in folders] == [str(n) for n in range(12)]


def test_a_refused_measurement_leaves_nothing_and_a_named_folder_is_taken(tmp_path: Path) -> None:
    with pytest.raises(UserError), own_folder(tmp_path / "runs/x/bench", BenchSettings(), OPTIONS, {}):
        raise UserError("no")
    given = argparse.Namespace(**{**vars(OPTIONS), "out": tmp_path / "mine"})
    with own_folder(tmp_path / "other", BenchSettings(), given, {}) as (folder, _):
        assert folder == tmp_path / "mine"
    assert not list(tmp_path.iterdir())


def test_the_name_says_the_prompts() -> None:
    name = measurement_name(BenchSettings(prompts="mt_bench,data/my prompts.jsonl"))
    assert name.split("_", 2)[2] == "mt_bench+my-prompts"
    assert len(measurement_name(BenchSettings(prompts="x" * 5000))) < 200


def write(folder: Path, results: dict[str, Any], time: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({**results, "measured_at": f"2026-11-{time}:00.000+00:00"}))


def test_the_newest_is_found_by_what_it_says(results: dict[str, Any], tmp_path: Path) -> None:
    assert newest_results(folders_of(tmp_path)) is None
    write(tmp_path / "bench/new", results, "04T10:00")
    write(tmp_path / "bench/old", results, "03T23:00")
    write(tmp_path, results, "04T09:59")
    (tmp_path / "bench/empty").mkdir()
    found = newest_results(folders_of(tmp_path))
    assert found is not None and found[0] == report.find_results(tmp_path / "bench")[0] == tmp_path / "bench/new"
    write(tmp_path, results, "04T10:00")  # as new
    found = newest_results(folders_of(tmp_path))
    assert found is not None and found[0] == tmp_path


def test_where_there_are_no_results(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("", "nowhere", "x" * 300, "a\0b"):
        assert exit_status(lambda path=path: report.main([path])) == 2  # type: ignore[misc]
        assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())
