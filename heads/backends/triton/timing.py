"""Time of some work on the device, without launches."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

REPEATS = 5
ENOUGH, MOST = 5e-4, 100
"""Seconds below which work is captured several times over, and how often at most: what starts a graph would show beside
it."""


def device_seconds(work: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds of `work`, the best of some repeats after a first that does not count.

    On a GPU its operations are captured as a graph and replayed, so that the host's part is left out; `work` must not
    wait for the host.
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
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # others may allocate
        for _ in range(times):
            work()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int = REPEATS) -> float:
    """Seconds of one replay, the best of `repeats`; each is launched while the one before it runs, so that the device
    does not wait for the host in between."""
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
