"""Training figures between two log lines: summed on the device, averaged over rows when the line is written."""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from heads.errors import UserError


@dataclass
class Interval:
    """Sums over the steps since the last log line; a step need not wait for the device to have them."""

    counts: Tensor | None = None  # (K,) float64, over all processes
    sums: Tensor | None = None  # (K,), this process's
    metrics: dict[str, Tensor] = field(default_factory=dict)  # name -> (K,), this process's
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    def add_micro(self, sums: Tensor, metrics: dict[str, Tensor]) -> None:
        """One micro-batch of this process."""
        self.sums = sums if self.sums is None else self.sums + sums
        for name, value in metrics.items():
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value

    def add_step(self, counts: Tensor, tokens: int) -> None:
        """One step of all processes: supervised rows by depth, and tokens."""
        self.counts = counts if self.counts is None else self.counts + counts
        self.tokens += tokens

    def leave_out(self, seconds: float) -> None:
        """Time that was not spent on steps."""
        self.started += seconds

    def averages(self, accelerator: Accelerator, weights: Tensor) -> dict[str, Any]:
        """`loss`, and by depth `loss_by_depth`, `accuracy` and the head's other metrics; None where no row was."""
        assert self.counts is not None and self.sums is not None
        names = ["loss_by_depth", *self.metrics]
        sums = torch.stack([self.sums.double(), *(value.double() for value in self.metrics.values())])
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums, reduction="sum")
        counts = self.counts.tolist()
        rows = {
            name: [value / count if count else None for value, count in zip(values, counts, strict=True)]
            for name, values in zip(names, sums.tolist(), strict=True)
        }
        by_depth = zip(weights.tolist(), rows["loss_by_depth"], strict=True)
        rows["accuracy"] = rows.pop("correct")
        return {"loss": sum(weight * value for weight, value in by_depth if value is not None), **rows}

    def tokens_per_second(self) -> float:
        return self.tokens / (time.perf_counter() - self.started)


class Pace:
    """The seconds that the steps to come will take, by the latest log lines.

    The first step of a process is left out, in which libraries warm up, and so are measurements, which are timed apart.
    """

    def __init__(self) -> None:
        self.marks: deque[tuple[int, float]] = deque(maxlen=6)
        self.measurement = 0.0
        """Seconds of the latest measurement."""

    def mark(self, step: int) -> None:
        """Note that `step` steps are made."""
        self.marks.append((step, time.perf_counter()))

    def measured(self, seconds: float) -> None:
        """Leave out a measurement that took so long."""
        self.measurement = seconds
        self.marks = deque(((step, at + seconds) for step, at in self.marks), maxlen=self.marks.maxlen)

    def seconds_left(self, steps: int, measurements: int) -> float:
        """Of `steps` steps and so many measurements."""
        (first, begin), (last, end) = self.marks[0], self.marks[-1]
        return steps * (end - begin) / max(last - first, 1) + measurements * self.measurement


def check_finite(loss: float, step: int) -> None:
    """Refuse to go on with a run that has diverged."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {step}: the run has diverged; lower train.lr or raise train.warmup_steps "
            "(the last checkpoint is intact)"
        )
