"""Training metrics between two log lines: summed on the device, and averaged over rows when the line is written."""

import time
from dataclasses import dataclass, field
from typing import Any, Self

import pydantic
import torch
from accelerate import Accelerator
from torch import Tensor

from heads.errors import UserError

LOSS = "loss_by_depth"


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(strict=True, extra="forbid"))
class Sums:
    """The sums of an interval at a checkpoint, as plain numbers."""

    seconds: float
    """Time spent on the interval's steps so far."""
    tokens: int
    counts: list[float]
    """Supervised rows by depth."""
    sums: dict[str, list[float]]
    """The loss and the head's other metrics by depth, summed over all processes."""

    def fits(self, depths: int) -> bool:
        return LOSS in self.sums and all(len(row) == depths for row in (self.counts, *self.sums.values()))


@dataclass
class Interval:
    """Sums over the steps since the last log line. Adding a step does not wait for the device."""

    counts: Tensor | None = None  # (K,) float64, over all processes
    sums: dict[str, Tensor] = field(default_factory=dict)  # LOSS, and each other metric -> (K,), this process's
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    """Moved by the time that was not spent on steps."""
    unchecked: list[Tensor] = field(default_factory=list)
    """() for each step since the last check, in this process: finite if the step's loss and gradients are."""

    def add_micro(self, sums: Tensor, metrics: dict[str, Tensor]) -> None:
        """Add one micro-batch of this process."""
        for name, value in {LOSS: sums, **metrics}.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_step(self, counts: Tensor, tokens: int, norm: Tensor) -> None:
        """Add one step of all processes: supervised rows by depth, tokens, and the gradients' norm ()."""
        self.counts = counts if self.counts is None else self.counts + counts
        self.tokens += tokens
        self.unchecked.append(self.sums[LOSS].sum() + norm)

    def check(self, accelerator: Accelerator, step: int) -> None:
        """Raise UserError if the loss or the gradients of a step since the last check were not finite. `step`: steps
        made so far. Called by every process, before the weights are measured or saved."""
        if not self.unchecked:
            return
        wrong = (~torch.stack(self.unchecked).isfinite()).double()
        if accelerator.num_processes > 1:
            wrong = accelerator.reduce(wrong, reduction="sum")
        first = next((n for n, value in enumerate(wrong.tolist()) if value), None)
        if first is not None:
            raise UserError(
                f"the loss or its gradients are not finite at step {step - len(wrong) + first + 1}: the run has "
                "diverged; lower train.lr or raise train.warmup_steps in another output_dir (the last checkpoint is of "
                "a step before, and the same command goes on from it)"
            )
        self.unchecked.clear()

    def cut(self, accelerator: Accelerator) -> Sums | None:
        """Return the sums from which a resumed run goes on, or None between two intervals. Called by every process."""
        if self.counts is None:
            return None
        names, sums = self._sums(accelerator)
        by_name = dict(zip(names, sums.tolist(), strict=True))
        return Sums(time.perf_counter() - self.started, self.tokens, self.counts.tolist(), by_name)

    @classmethod
    def resumed(cls, before: Sums | None, accelerator: Accelerator) -> Self:
        """Return an interval that continues from `before`, or a new one if that is None. The main process holds the
        sums of `before`; the other processes begin with zeros."""
        if before is None:
            return cls()
        share, device = float(accelerator.is_main_process), accelerator.device
        sums = {name: share * torch.tensor(value, device=device) for name, value in before.sums.items()}
        counts = torch.tensor(before.counts, dtype=torch.float64, device=device)
        return cls(counts, sums, before.tokens, time.perf_counter() - before.seconds)

    def averages(self, accelerator: Accelerator, weights: Tensor) -> dict[str, Any]:
        """Return `loss`, and by depth `loss_by_depth`, `accuracy` and the head's other metrics. A depth without rows
        has None."""
        assert self.counts is not None
        names, sums = self._sums(accelerator)
        counts = self.counts.tolist()
        rows = {
            name: [value / count if count else None for value, count in zip(values, counts, strict=True)]
            for name, values in zip(names, sums.tolist(), strict=True)
        }
        by_depth = zip(weights.tolist(), rows[LOSS], strict=True)
        rows["accuracy"] = rows.pop("correct")
        return {"loss": sum(weight * value for weight, value in by_depth if value is not None), **rows}

    def _sums(self, accelerator: Accelerator) -> tuple[list[str], Tensor]:
        """Return the names of the metrics and, for each, a row of sums (K,) float64 over all processes."""
        sums = torch.stack([value.double() for value in self.sums.values()])
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums, reduction="sum")
        return list(self.sums), sums

    def tokens_per_second(self) -> float:
        return self.tokens / (time.perf_counter() - self.started)
