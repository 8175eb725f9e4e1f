"""Detection of other processes on the cores that this one's threads are to run on.

Threads that compute one product wait for the slowest of them, thousands of times a step: where one core fewer is free
than there are threads, a step can take many times as long, and only a look at the machine shows the reason.
"""

import os
import time
from pathlib import Path

import torch

STAT = Path("/proc/stat")
CONTENTION_SECONDS = 0.3


def contention(device: torch.device) -> str | None:
    """Return advice if a CPU's cores are taken; None if they are not, or cannot be watched."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or not STAT.is_file():
        return None
    before = read_ticks(STAT.read_text())
    time.sleep(CONTENTION_SECONDS)
    cores = os.sched_getaffinity(0)
    return contended(idle_cores(before, read_ticks(STAT.read_text()), cores), len(cores), threads)


def contended(idle: float, cores: int, threads: int) -> str | None:
    """Return advice if `threads` threads share `idle` of `cores` cores; None if these suffice."""
    if idle >= threads - 0.5:
        return None
    return (
        f"other processes use {cores - idle:.1f} of the {cores} cores on which {threads} threads are to run here, and "
        "every step waits for the slowest: OMP_NUM_THREADS=1 before the command may make it many times faster"
    )


def read_ticks(text: str) -> dict[int, tuple[int, int]]:
    """Return (idle, all) ticks since the machine was started by core, from /proc/stat's text."""
    found = {}
    for line in text.splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(value) for value in values[:8]]  # what guests used is in the first already
            found[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    return found


def idle_cores(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]], cores: set[int]) -> float:
    """Return the number of `cores` that were idle between the two."""
    shares = []
    for core in cores & before.keys() & after.keys():
        (idle, total), (idle_then, total_then) = after[core], before[core]
        shares.append((idle - idle_then) / max(total - total_then, 1))
    return sum(shares)
