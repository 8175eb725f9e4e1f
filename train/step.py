"""One optimizer step, over all micro-batches and processes.

A step sums each depth's loss over all its supervised rows, of all micro-batches and processes, and divides by their
number, which the masks give before the first forward pass: the step is the same however it is cut up. The rows and the
random state of a step are functions of (seed, step, process), so a resumed run goes on bit for bit.
"""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from heads.base import DraftHead
from heads.errors import UserError
from train.adapter import merged_weights
from train.averages import Interval
from train.data.packing import Mixture, Rows
from train.features.base import FeatureSource
from train.features.batch import make_batch
from train.interrupts import Interrupted
from train.launch import SHARDED
from train.optim import make_optimizer, set_lr
from train.recipe import Train
from train.trained import Trained

SEED_STRIDE = 1_000_003


def check_mode(head: DraftHead, mode: DistributedType) -> None:
    """Refuse heads whose gradients a step divides in a mode of launch that does not hand them out."""
    if head.weighs_rows and mode == DistributedType.DEEPSPEED:
        raise UserError(
            "head.weights: d_pace divides a step's gradients, which DeepSpeed does not hand out; use exponential, or "
            "launch without DeepSpeed"
        )


class Stepper:
    """A head, its optimizer, and the data it learns from."""

    def __init__(
        self, settings: Train, trained: Trained, features: FeatureSource, mixture: Mixture, accelerator: Accelerator
    ):
        self.trained, self.features, self.target, self.mixture = trained, features, features.target, mixture
        self.accelerator, self.settings = accelerator, settings
        self.weights = torch.tensor(trained.depth_weights, device=accelerator.device)
        products = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        optimizer = make_optimizer(trained.parts(), settings, products)
        self.model, self.optimizer = accelerator.prepare(trained, optimizer)
        self.dtype = next(parameter for parameter in self.model.parameters()).dtype
        self.norm: Any = None
        self.expected = 0
        """The first step whose rows the source of features does not know of."""

    def step(self, number: int, interval: Interval, *, stop: bool) -> int:
        """Make step `number` (from 0), add its figures to `interval`, and return the tokens of all processes.

        Raises Interrupted, nothing changed, if any process is to stop.
        """
        settings, accelerator = self.settings, self.accelerator
        torch.manual_seed(settings.seed + SEED_STRIDE * (number + 1) + accelerator.process_index)
        self.trained.begin_step(number)
        for coming in range(max(self.expected, number), min(number + self.features.steps_ahead, settings.max_steps)):
            for rows in self._rows(coming):
                self.features.expect(rows)
            self.expected = coming + 1
        micros = self._rows(number)
        own = torch.stack(
            [self.trained.counts(rows.loss_mask, rows.documents).double() for rows in micros]
        )  # (micro, K)
        tokens = sum(int((rows.documents >= 0).sum()) for rows in micros)
        counts, tokens, stop = self._total(own.sum(0), tokens, stop)
        if stop:
            raise Interrupted
        set_lr(self.optimizer, number, settings)
        # Accelerate, or DeepSpeed's engine, divides by grad_accum and averages over processes; the sum here is over
        # both already.
        scale = self.trained.loss_scale(counts).float() * (accelerator.num_processes * settings.grad_accum)
        distributed, weight = accelerator.num_processes > 1, torch.zeros((), device=accelerator.device)
        for rows, count in zip(micros, own, strict=True):
            with accelerator.autocast(), self.trained.original_target():
                batch = make_batch(self.target, rows, self.trained.drafts.aux_layer_ids, self.dtype)
            with accelerator.accumulate(self.model):
                loss, sums, metrics, own_weight = self.model(batch, scale, distributed and not bool(count.all()))
                accelerator.backward(loss)
                if own_weight is not None:
                    weight = weight + own_weight
                    if accelerator.sync_gradients:
                        self._divide_gradients(weight)
                if accelerator.sync_gradients:
                    self.norm = accelerator.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            interval.add_micro(sums, metrics)
        interval.add_step(counts, tokens)
        return tokens

    def _rows(self, number: int) -> list[Rows]:
        """This process's rows of step `number`, by micro-batch."""
        settings, accelerator = self.settings, self.accelerator
        return [
            self.mixture.batch(
                number,
                micro,
                accelerator.process_index,
                batch_size=settings.batch_size,
                num_micro=settings.grad_accum,
                num_processes=accelerator.num_processes,
            )
            for micro in range(settings.grad_accum)
        ]

    def _divide_gradients(self, weight: Tensor) -> None:
        """Divide the step's gradients by the weight () of its rows, of all processes."""
        if self.accelerator.num_processes > 1:
            weight = self.accelerator.reduce(weight, reduction="sum")
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(weight.clamp(min=1e-6))

    def grad_norm(self) -> float | None:
        """The last step's gradient norm: FSDP gives a DTensor, DeepSpeed stage 0 nothing."""
        if self.norm is None:
            return None
        full = getattr(self.norm, "full_tensor", None)
        return float(full() if full is not None else self.norm)

    def head_weights(self) -> dict[str, Tensor]:
        """The head's weights as they are measured and saved; on the main process if they are sharded."""
        head = self.trained.head
        if self.accelerator.distributed_type not in SHARDED:
            return merged_weights(head, head.state_dict())
        weights: dict[str, Tensor] = self.accelerator.get_state_dict(self.model) or {}
        return merged_weights(head, {name.removeprefix("head."): tensor for name, tensor in weights.items()})

    def _total(self, counts: Tensor, tokens: int, stop: bool) -> tuple[Tensor, int, bool]:
        """Sums over all processes; True, last, if any of them is to stop."""
        device = self.accelerator.device
        if self.accelerator.num_processes == 1:
            return counts.to(device), tokens, stop
        both = torch.cat([counts, counts.new_tensor([tokens, stop])]).to(device)
        both = self.accelerator.reduce(both, reduction="sum")
        return both[:-2], int(both[-2]), bool(both[-1])
