"""The line about a machine on which other processes are busy, and the commit that records name."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from eval.measure.machine import commit, settle_threads
from tests.support.annotations import Patch


@pytest.mark.parametrize(
    ("others", "threads", "wanted", "said"),
    [
        ([0.0, 0.0], 2, None, None),
        ([100.0, 20.0], 2, None, "use 1.2 of the 2 cores on which 2 threads were to run here"),
        ([100.0, 20.0], 2, "2", "OMP_NUM_THREADS=1 before the command may make it many times faster"),
        ([100.0, 20.0], 1, None, None),  # one thread needs no more than what is left
        ([100.0, 90.0], 1, None, "use 1.9 of the 2 cores: times measured now are of a busy machine"),
    ],
)
def test_only_other_processes_are_held_against_a_run(
    others: list[float], threads: int, wanted: str | None, said: str | None, monkeypatch: Patch
) -> None:
    """The machine is a made one; this process's work on it is real."""

    def look(seconds: float, percpu: bool) -> list[float]:
        started, own = time.perf_counter(), time.process_time()
        while time.perf_counter() < started + seconds:
            pass
        return [others[0] + 100 * (time.process_time() - own) / (time.perf_counter() - started), *others[1:]]

    monkeypatch.setattr("psutil.cpu_percent", look)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wanted:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    line = settle_threads(torch.device("cpu"))
    assert line is None if said is None else line is not None and said in line
    assert taken == [1] * (said is not None and threads > 1 and wanted is None)
    assert settle_threads(torch.device("cuda")) is None


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_record_names_the_commit_of_these_files_not_of_a_clone_around(tmp_path: Path, monkeypatch: Patch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "copy").mkdir()
    (tmp_path / "file").write_text("one")
    for words in ("init", "add file", "commit -m one"):
        git(*words.split())
    monkeypatch.setattr("eval.measure.machine.ROOT", tmp_path)
    monkeypatch.delenv("DRAFTSMITH_COMMIT", raising=False)
    head = git("rev-parse", "--short=12", "HEAD")
    assert commit() == head
    (tmp_path / "file").write_text("two")
    assert commit() == f"{head}+"
    monkeypatch.setattr("eval.measure.machine.ROOT", tmp_path / "copy")
    assert commit() == "unknown"
    monkeypatch.setenv("DRAFTSMITH_COMMIT", "0123456789ab")
    assert commit() == "0123456789ab"
