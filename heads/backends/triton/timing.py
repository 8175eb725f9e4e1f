"""Timing of work on the device, without the time of launches."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

REPEATS = 5
ENOUGH, MOST = 5e-4, 100
"""Seconds below which work is repeated within one graph, and the maximum number of repeats. Else the time to start the
graph would distort the result."""


def device_seconds(work: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the seconds of `work`, the best of `repeats` after a warm-up.

    On a GPU, its operations are captured as a CUDA graph and replayed, so that host time is excluded. `work` must not
    synchronize with the host.
    """
    if device.type != "cuda":
        work()
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        return min(seconds)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    once = replay_seconds(captured(work, stream, 1), repeats)
    times = min(MOST, math.ceil(ENOUGH / once))
    return once if times == 1 else replay_seconds(captured(work, stream, times), repeats) / times


def captured(work: Callable[[], Any], stream: torch.cuda.Stream, times: int) -> torch.cuda.CUDAGraph:
    """Return a graph of `work`, repeated `times` times."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # other threads may allocate
        for _ in range(times):
            work()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int = REPEATS) -> float:
    """Return the seconds of one replay, the best of `repeats`. Each timed replay is launched while another one runs, so
    that the device does not wait for the host in between."""
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best
