"""A warning of cores that others use, before anything is computed on them."""

import os
from pathlib import Path

import torch

from eval.benchmark.environment import advice, contention, idle_seconds

CORES = len(os.sched_getaffinity(0))


def test_it_is_said_where_a_thread_has_no_core() -> None:
    said = advice(CORES + 1, 0.0)
    assert said is not None and f"cores on which {CORES + 1} threads are to run" in said
    assert advice(2, 0.0) is not None and advice(2, 1.8) is None


def test_another_device_waits_for_nobody() -> None:
    assert contention(torch.device("cuda")) is None


def test_only_own_cores_count(tmp_path: Path) -> None:
    cores = "".join(f"cpu{core} 300 0 30 90 10 0 0 0 0 0\n" for core in sorted(os.sched_getaffinity(0)))
    text = f"cpu  900 0 100 90 0 0 0 0 0 0\n{cores}cpu99999 1 1 1 777 0 0 0 0 0 0\nintr 12345 0 0\n"
    (tmp_path / "stat").write_text(text)
    assert idle_seconds(tmp_path / "stat") == CORES * 100 / os.sysconf("SC_CLK_TCK")
