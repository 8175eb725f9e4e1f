"""Cores that others use are told of before anything is computed on them."""

import os
import time
from pathlib import Path

import pytest
import torch

from eval.benchmark import environment
from eval.benchmark.environment import contention, idle_seconds

CPU = torch.device("cpu")


def stat(idle: int) -> str:
    cores = "".join(f"cpu{core} 300 0 30 {idle} 10 0 0 0 0 0\n" for core in sorted(os.sched_getaffinity(0)))
    return f"cpu  900 0 100 {idle} 0 0 0 0 0 0\n{cores}cpu99999 1 1 1 777 0 0 0 0 0 0\nintr 12345 0 0\n"


def test_it_is_said_where_a_thread_has_no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, threads = tmp_path / "stat", len(os.sched_getaffinity(0)) + 1
    monkeypatch.setattr(environment, "STAT", file)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    file.write_text(stat(90))
    assert idle_seconds() == (threads - 1) * 100 / os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    said = contention(CPU)  # not a tick went by idle
    assert said is not None and f"cores on which {threads} threads are to run" in said
    monkeypatch.setattr(time, "sleep", lambda _: file.write_text(stat(10**9)))
    assert contention(CPU) is None


def test_one_thread_or_another_device_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "idle_seconds", lambda: 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert contention(CPU) is not None and contention(torch.device("cuda")) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert contention(CPU) is None
