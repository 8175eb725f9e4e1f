"""One optimizer step, over all micro-batches and processes, and the metrics of the steps between two log lines.

For each depth, a step sums the loss over the supervised rows of all micro-batches and processes, and divides by the
number of these rows. The masks give that number before the first forward pass, so the step does not depend on how its
rows are divided. The rows of a step are a function of (seed, step). The random state of a pass is a function of (seed,
index of its rows in the endless order). So a resumed run continues bit for bit, and with another number of processes it
sees the same rows and the same random numbers.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Self

import pydantic
import torch
from accelerate import Accelerator
from torch import Tensor

from heads.core.errors import UserError
from train.core.interrupts import Interrupted
from train.data.packing import Mixture
from train.features.feature_source import FeatureSource, make_batch
from train.recipe.recipe import Train
from train.steps.draft_lora import merged_weights
from train.steps.learning_rate import learning_rate
from train.steps.parallel import LossModule, make_strategy

SEED_STRIDE = 1_000_003
METRICS = ("loss_by_depth", "correct")
"""Names of an interval's sums in a checkpoint."""


def rows_per_step(settings: Train, context_length: int, num_processes: int) -> int:
    """Return the rows of one optimizer step, over all its passes and processes. UserError if `tokens_per_step` is not
    a whole number of passes."""
    rows = settings.batch_size * num_processes
    if settings.tokens_per_step is None:
        return rows
    tokens = rows * context_length
    passes, rest = divmod(settings.tokens_per_step, tokens)
    if rest or not passes:
        nearest = " or ".join(str(n * tokens) for n in (passes, passes + 1) if n)
        raise UserError(
            f"train.tokens_per_step: {settings.tokens_per_step} are not whole passes of {tokens} tokens "
            f"(train.batch_size {settings.batch_size} x data.context_length {context_length} x {num_processes} "
            f"processes); expected {nearest}, or another train.batch_size"
        )
    return rows * passes


def rows_of_process(step: int, rows: int, batch_size: int, process: int, num_processes: int) -> list[range]:
    """Return the rows of each pass of a process in step `step`, as ranges of indices in the endless order. Together the
    processes read the same `rows` rows, whatever their number."""
    begin = step * rows + process * batch_size
    stride = batch_size * num_processes
    return [range(first, first + batch_size) for first in range(begin, (step + 1) * rows, stride)]


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(strict=True, extra="forbid"))
class Sums:
    """The sums of an interval at a checkpoint, as plain numbers."""

    seconds: float
    """Time spent on the interval's steps so far."""
    tokens: int
    counts: list[float]
    """Supervised rows by depth."""
    sums: dict[str, list[float]]
    """The loss and the right predictions by depth, summed over all processes."""

    def fits(self, depths: int) -> bool:
        return self.sums.keys() >= {*METRICS} and all(len(row) == depths for row in (self.counts, *self.sums.values()))


@dataclass
class Interval:
    """Sums over the steps since the last log line. Adding a step does not wait for the device."""

    counts: Tensor | None = None  # (K,) float64, over all processes
    sums: Tensor | None = None  # (2, K), of the loss and the correct predictions, this process's
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    """Moved by the time that was not spent on steps."""
    unchecked: list[Tensor] = field(default_factory=list)
    """() for each step since the last check, in this process: finite if the step's loss and gradients are."""

    def add_micro(self, loss: Tensor, correct: Tensor) -> None:
        sums = torch.stack([loss, correct.to(loss.dtype)])
        self.sums = sums if self.sums is None else self.sums + sums

    def add_step(self, counts: Tensor, tokens: int, norm: Tensor) -> None:
        assert self.sums is not None
        self.counts = counts if self.counts is None else self.counts + counts
        self.tokens += tokens
        self.unchecked.append(self.sums[0].sum() + norm)

    def check(self, accelerator: Accelerator, step: int) -> None:
        """Raise UserError if the loss or the gradients of a step since the last check were not finite. `step`: steps
        made so far. Called by every process, before the weights are measured or saved."""
        if not self.unchecked:
            return
        wrong = accelerator.reduce((~torch.stack(self.unchecked).isfinite()).double(), reduction="sum")
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
        if self.counts is None or self.sums is None:
            return None
        sums = dict(zip(METRICS, accelerator.reduce(self.sums.double(), reduction="sum").tolist(), strict=True))
        return Sums(time.perf_counter() - self.started, self.tokens, self.counts.tolist(), sums)

    @classmethod
    def resumed(cls, before: Sums | None, accelerator: Accelerator) -> Self:
        """Return an interval that continues from `before`, or a new one if that is None. The main process holds the
        sums of `before`; the other processes begin with zeros."""
        if before is None:
            return cls()
        share = float(accelerator.is_main_process)
        device = accelerator.device
        sums = share * torch.tensor([before.sums[name] for name in METRICS], device=device)
        counts = torch.tensor(before.counts, dtype=torch.float64, device=device)
        return cls(counts, sums, before.tokens, time.perf_counter() - before.seconds)

    def averages(self, accelerator: Accelerator, weights: Tensor) -> dict[str, object]:
        """Return `loss`, and by depth `loss_by_depth` and `accuracy`. A depth without rows has None."""
        assert self.counts is not None and self.sums is not None
        loss, accuracy = accelerator.reduce(self.sums.double(), reduction="sum").tolist()
        for depth, count in enumerate(self.counts.tolist()):
            loss[depth] = loss[depth] / count if count else None
            accuracy[depth] = accuracy[depth] / count if count else None
        by_depth = zip(weights.tolist(), loss, strict=True)
        mean = sum(weight * value for weight, value in by_depth if value is not None)
        return {"loss": mean, "loss_by_depth": loss, "accuracy": accuracy}

    def tokens_per_second(self) -> float:
        return self.tokens / (time.perf_counter() - self.started)


class Stepper:
    def __init__(
        self,
        settings: Train,
        module: LossModule,
        features: FeatureSource,
        mixture: Mixture,
        accelerator: Accelerator,
        rows: int,
    ):
        """`rows`: rows of a step, over all processes. UserError if they are not a whole number of passes."""
        self.head = module.head
        self.features = features
        self.target = features.target
        self.mixture = mixture
        self.accelerator = accelerator
        self.settings = settings
        self.rows = rows
        self.passes, rest = divmod(rows, settings.batch_size * accelerator.num_processes)
        if rest or not self.passes:
            raise UserError(
                f"a step of this run is {rows} rows, which {accelerator.num_processes} processes of train.batch_size "
                f"{settings.batch_size} cannot share; launch a number of processes that divides "
                f"{rows // settings.batch_size}"
            )
        self.weights = torch.tensor(module.head.depth_weights, device=accelerator.device)
        self.strategy = make_strategy(module, settings, accelerator, self.passes)
        self.dtype = next(module.parameters()).dtype
        self.norm = torch.zeros(())
        self.expected = 0
        """The first step whose rows have not yet been announced to the source of features."""

    def step(self, number: int, interval: Interval, *, stop: bool) -> int:
        """Make step `number` (from 0), add its metrics to `interval`, and return the tokens of all processes.

        If any process is to stop, raise Interrupted without changing anything.
        """
        settings = self.settings
        accelerator = self.accelerator
        strategy = self.strategy
        distributed = accelerator.num_processes > 1
        for coming in range(max(self.expected, number), min(number + self.features.steps_ahead, settings.steps)):
            for place in self._places(coming):
                self.features.expect(self.mixture.rows(place))
            self.expected = coming + 1
        places = self._places(number)
        progress = number / settings.steps
        micros = [replace(self.mixture.rows(place), seed=self._seed(place), progress=progress) for place in places]
        counts_by_pass = torch.stack([self.head.counts(rows).double() for rows in micros])  # (micro, K)
        tokens = sum(int((rows.documents >= 0).sum()) for rows in micros)
        counts, tokens, stop = self._total(counts_by_pass.sum(0), tokens, stop)
        if stop:
            raise Interrupted
        for group in strategy.optimizer.param_groups:  # Accelerate would step a scheduler once per process
            group["lr"] = learning_rate(number, settings)
        scale = self.head.loss_scale(counts).float()
        weight: Tensor | None = None
        for micro, (rows, count) in enumerate(zip(micros, counts_by_pass, strict=True)):
            with accelerator.autocast():
                batch = make_batch(self.target, rows, self.head.aux_layer_ids, self.dtype)
            with nullcontext() if micro == self.passes - 1 else strategy.no_sync():
                with accelerator.autocast():
                    touch_all = strategy.needs_all_gradients and distributed and not bool(count.all())
                    loss, sums, correct, part = strategy.model(batch, scale, touch_all)
                strategy.backward(loss)
            if part is not None:
                weight = part if weight is None else weight + part
            interval.add_micro(sums, correct)
        if weight is not None:
            total: Tensor = accelerator.reduce(weight, reduction="sum")
            strategy.divide_grads(total.clamp(min=1e-6))
        self.norm = strategy.update()
        interval.add_step(counts, tokens, self.norm)
        return tokens

    def _places(self, number: int) -> list[range]:
        process = self.accelerator.process_index
        world = self.accelerator.num_processes
        return rows_of_process(number, self.rows, self.settings.batch_size, process, world)

    def _seed(self, place: range) -> int:
        return self.settings.seed + SEED_STRIDE * (place.start // len(place) + 1)

    def head_weights(self) -> dict[str, Tensor]:
        """Return the head's weights with adapters merged. If they are sharded, only the main process gets them."""
        return merged_weights(self.head, self.strategy.weights())

    def _total(self, counts: Tensor, tokens: int, stop: bool) -> tuple[Tensor, int, bool]:
        device = self.accelerator.device
        if self.accelerator.num_processes == 1:
            return counts.to(device), tokens, stop
        both = torch.cat([counts, counts.new_tensor([tokens, stop])]).to(device)
        both = self.accelerator.reduce(both, reduction="sum")
        return both[:-2], int(both[-2]), bool(both[-1])
