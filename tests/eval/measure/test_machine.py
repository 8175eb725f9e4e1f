"""The line about a machine on which other processes are busy."""

import time

import pytest
import torch

from eval.measure.machine import contention

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("others", "threads", "said"),
    [
        ([0.0, 0.0], 2, None),
        ([100.0, 20.0], 2, "other processes use 1.2 of the 2 cores on which 2 threads are to run here"),
        ([100.0, 100.0], 1, None),  # one thread waits for no other
    ],
)
def test_only_other_processes_are_held_against_a_run(
    others: list[float], threads: int, said: str | None, monkeypatch: pytest.MonkeyPatch
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
    advice = contention(CPU)
    assert advice is None if said is None else advice is not None and said in advice and "OMP_NUM_THREADS=1" in advice
    assert contention(torch.device("cuda")) is None
