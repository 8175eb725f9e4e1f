"""Share of a round in which the device is idle, by the profiler's clock of every kernel."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eval.runtime.engine import Engine
from eval.runtime.graph import preserved
from heads.backends.slot_mapping import round_up

COUNT = 16
"""Rounds looked at."""


@torch.inference_mode()
def measure_idle(engine: Engine, length: int) -> dict[str, Any]:
    """Return, for an engine with rows at `length`, kernels a round, the share of a round in which none runs, and
    microseconds between two rounds."""
    rounds = engine.rounds_of(engine.decoder)
    extent = min(round_up(length + (COUNT + 1) * engine.nodes), engine.decoder.step.capacity)
    with preserved(engine.decoder.state):
        rounds(extent)
        engine.clock()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(COUNT):
                rounds(extent)
            engine.clock()
    events: Any = seen.events()
    return idle_of([(e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"], COUNT)


def idle_of(spans: Sequence[tuple[float, float]], count: int) -> dict[str, Any]:
    """The same from the (start, end) of every kernel, in microseconds, of `count` equal rounds one after another."""
    each, rest = divmod(len(spans), count)
    if rest or not each:
        raise ValueError(f"{len(spans)} kernels are no {count} equal rounds")
    ordered = sorted(spans)
    rounds = [ordered[i * each : (i + 1) * each] for i in range(count)]
    whole = sum(spans[-1][1] - spans[0][0] for spans in rounds)
    busy = sum(end - start for start, end in ordered)
    between = [later[0][0] - sooner[-1][1] for sooner, later in pairwise(rounds)]
    return {
        "kernels": each,
        "round_us": whole / count,
        "idle_share": max(0.0, 1 - busy / whole),
        "gap_us": sum(between) / max(1, len(between)),
    }
