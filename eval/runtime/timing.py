"""How long the device takes for something, launches left out."""

import time
from collections.abc import Callable
from typing import Any

import torch

REPEATS = 5


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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        held = work()
    replay = replay_seconds(graph, repeats)
    del held
    return replay


def replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int = REPEATS) -> float:
    """Seconds of one replay, the best of `repeats`."""
    graph.replay()
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best
