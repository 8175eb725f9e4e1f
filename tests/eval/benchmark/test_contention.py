"""Cores that others use are told of before anything is computed on them."""

import pytest
import torch

from eval.benchmark import contention as contention
from eval.benchmark.contention import contended, idle_cores, read_ticks

BEFORE = """cpu  900 0 100 3000 0 0 0 0 0 0
cpu0 300 0 30 1000 10 0 0 0 0 0
cpu1 300 0 30 1000 10 0 0 0 0 0
cpu2 300 0 30 1000 10 0 0 0 7 0
intr 12345 0 0
ctxt 999
"""
AFTER = """cpu  950 0 100 3010 0 0 0 0 0 0
cpu0 300 0 30 1020 10 0 0 0 0 0
cpu1 315 0 30 1000 15 0 0 0 0 0
cpu2 310 0 40 1000 10 0 0 0 17 0
intr 12345 0 0
ctxt 999
"""


def test_idle_time_is_counted_on_the_cores_this_process_may_use() -> None:
    before, after = read_ticks(BEFORE), read_ticks(AFTER)
    assert before[0] == (1010, 1340) and len(before) == 3
    assert idle_cores(before, after, {0}) == 1.0
    assert idle_cores(before, after, {0, 1, 2}) == pytest.approx(1.0 + 0.25 + 0.0)
    assert idle_cores(before, after, {0, 7}) == 1.0


def test_it_is_said_where_a_thread_has_no_core() -> None:
    assert contended(2.0, 2, 2) is None and contended(3.2, 8, 3) is None
    said = contended(0.9, 2, 2)
    assert said is not None and "use 1.1 of the 2 cores on which 2 threads" in said


def test_one_thread_or_another_device_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "idle_cores", lambda *_: 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert contention.contention(torch.device("cpu")) is not None
    assert contention.contention(torch.device("cuda")) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert contention.contention(torch.device("cpu")) is None
