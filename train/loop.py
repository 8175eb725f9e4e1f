"""fit(recipe): the one training loop, for every kind of head.

A step sums each depth's loss over all its supervised rows, of all micro-batches and processes, and divides by their
number, which the masks give before the first forward pass: the step is the same however it is cut up. The rows and the
random state of a step are functions of (seed, step, process), so a resumed run goes on bit for bit.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from eval.files import write_json
from eval.runtime.engine import Request
from heads.base import Batch, DraftHead
from heads.checkpoint import save_head, target_record
from train.checkpointing import (
    RunState,
    check_continues,
    load_checkpoint,
    newest_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from train.features import make_batch
from train.interrupts import Interrupted, Interrupts
from train.interval import Interval, check_finite
from train.launch import SHARDED, die_with_launcher, make_accelerator, on_main
from train.measuring import load_requests, measure
from train.optim import lr_factor, make_optimizer, set_lr
from train.packing import Mixture
from train.preparing import Ground, check_head, check_supervision, load_data, load_ground, make_head
from train.provenance import make_provenance
from train.recipe import Recipe
from train.run_folder import RunFolder
from train.tracker import Tracker

SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Outcome:
    """What `fit` leaves to its caller: the run folder, and the target still in memory."""

    folder: RunFolder
    ground: Ground
    accelerator: Accelerator
    tracker: Tracker


class LossModule(nn.Module):
    """A head as the module whose forward is its loss, which is what DDP, DeepSpeed and FSDP wrap."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head: Any = head

    def forward(self, batch: Batch, scale: Tensor, touch_all: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(scaled loss, (K,) sums, metric sums). `touch_all`: no parameter is left without a gradient."""
        result = self.head.loss(batch, scale)
        loss = result.loss
        if touch_all or not loss.requires_grad:  # else DDP would wait for gradients that never come
            loss = loss + sum(parameter.sum() * 0 for parameter in self.head.parameters() if parameter.requires_grad)
        return loss, result.sums, result.metrics


def fit(recipe: Recipe) -> Outcome:
    """Train the recipe's head, or go on where an earlier run of the same recipe stopped.

    Raises UserError for what a user can mend, and Interrupted when told to stop, a resumable checkpoint written.
    """
    die_with_launcher()
    with Interrupts() as interrupts:
        accelerator = make_accelerator(recipe.train)
        folder = RunFolder(Path(recipe.output_dir))
        tracker = Tracker(recipe, folder, main=accelerator.is_main_process)
        try:
            on_main(accelerator, lambda: _take_folder(folder, recipe))
            ground = load_ground(accelerator, recipe)
            outcome = Outcome(folder, ground, accelerator, tracker)
            if _is_finished(accelerator, recipe, folder, tracker):
                return outcome
            Training(recipe, folder, accelerator, tracker, interrupts, ground).run()
            return outcome
        except BaseException:
            tracker.finish(code=1)
            folder.unlock()
            raise


class Training:
    """One run, from its data to its last step."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        accelerator: Accelerator,
        tracker: Tracker,
        interrupts: Interrupts,
        ground: Ground,
    ):
        self.recipe, self.folder, self.accelerator, self.tracker = recipe, folder, accelerator, tracker
        self.interrupts, self.ground = interrupts, ground
        self.requests: Sequence[Request] = load_requests(recipe.eval, ground.tokenizer, ground.target.context_length)
        check_head(recipe, ground)
        self.mixture: Mixture = load_data(accelerator, recipe, ground, folder, tracker)
        head = make_head(recipe, ground, self.mixture)
        self.module, self.head = head, cast(DraftHead, head)
        check_supervision(self.head, self.mixture)
        # What is measured and saved is one thing: the weights in the target's dtype.
        self.measured = copy.deepcopy(head).to(ground.target.dtype).eval()
        self.weights = torch.tensor(self.head.depth_weights, device=accelerator.device)
        self.model, self.optimizer = accelerator.prepare(LossModule(head), make_optimizer(head, recipe.train))
        self.dtype = next(parameter for parameter in self.model.parameters()).dtype
        self.state = RunState(
            data=self.mixture.digest(), num_processes=accelerator.num_processes, num_threads=torch.get_num_threads()
        )
        self.saved_step: int | None = None

    def run(self) -> None:
        """Steps, measurements and checkpoints up to `max_steps`."""
        self._resume()
        self.tracker.start(self.state.step)
        on_main(self.accelerator, self._write_records)
        last = self.recipe.train.max_steps
        self.interval = Interval()
        self.started, self.started_step = time.perf_counter(), self.state.step
        with self.interrupts.held():
            try:
                self._between_steps()
                while self.state.step < last:
                    self._step()
                    self._between_steps()
            except Interrupted:
                self._checkpoint()
                self.tracker.say(f"interrupted at step {self.state.step}; the same command goes on from there")
                raise
        best = f"tau {self.state.best_tau:.3f} at step {self.state.best_step}"
        self.tracker.finish()
        self.tracker.say(
            f"trained {last} steps in {self.state.seconds:.0f} s; best head: {best}, in {self.folder.head}"
        )

    def _between_steps(self) -> None:
        """What is due once `state.step` steps are made."""
        step, train = self.state.step, self.recipe.train
        ended = step == train.max_steps
        measuring = ended or (train.eval_every is not None and step > 0 and step % train.eval_every == 0)
        if measuring and self.state.measured_step != step:
            self._measure()
        if ended or (step > 0 and step % train.checkpoint_every == 0):
            self._checkpoint()

    def _step(self) -> None:
        """One optimizer step."""
        train, state, accelerator = self.recipe.train, self.state, self.accelerator
        started = time.perf_counter()
        torch.manual_seed(train.seed + SEED_STRIDE * (state.step + 1) + accelerator.process_index)
        micros = [
            self.mixture.batch(
                state.step,
                micro,
                accelerator.process_index,
                batch_size=train.batch_size,
                num_micro=train.grad_accum,
                num_processes=accelerator.num_processes,
            )
            for micro in range(train.grad_accum)
        ]
        own = torch.stack([self.head.counts(rows.loss_mask, rows.documents).double() for rows in micros])  # (micro, K)
        tokens = sum(int((rows.documents >= 0).sum()) for rows in micros)
        counts, tokens, asked = self._total(own.sum(0), tokens, self.interrupts.asked)
        if asked:
            raise Interrupted
        set_lr(self.optimizer, train.lr * lr_factor(state.step, train))
        # Accelerate, or DeepSpeed's engine, divides by grad_accum and averages over processes; the sum here is over
        # both already.
        scale = (self.weights / counts.clamp(min=1)).float() * (accelerator.num_processes * train.grad_accum)
        distributed = accelerator.num_processes > 1
        for rows, count in zip(micros, own, strict=True):
            with accelerator.autocast():
                batch = make_batch(self.ground.target, rows, self.head.taps, self.dtype)
            with accelerator.accumulate(self.model):
                loss, sums, metrics = self.model(batch, scale, distributed and not bool(count.all()))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    self.norm = accelerator.clip_grad_norm_(self.model.parameters(), train.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.interval.add_micro(sums, metrics)
        self.interval.add_step(counts, tokens)
        state.step += 1
        state.tokens += tokens
        self.tracker.advance()
        if state.step % train.log_every == 0 or state.step == train.max_steps:
            self._log()
        state.seconds += time.perf_counter() - started

    def _total(self, counts: Tensor, tokens: int, asked: bool) -> tuple[Tensor, int, bool]:
        """Sums over all processes, with whether any of them was told to stop."""
        device = self.accelerator.device
        if self.accelerator.num_processes == 1:
            return counts.to(device), tokens, asked
        both = torch.cat([counts, counts.new_tensor([tokens, asked])]).to(device)
        both = self.accelerator.reduce(both, reduction="sum")
        return both[:-2], int(both[-2]), bool(both[-1])

    def _log(self) -> None:
        """Record the interval and begin a new one."""
        state, train = self.state, self.recipe.train
        averages = self.interval.averages(self.accelerator, self.weights)
        check_finite(averages["loss"], state.step)
        record = {
            "step": state.step,
            **averages,
            "lr": train.lr * lr_factor(state.step - 1, train),
            "grad_norm": _number(self.norm),
            "tokens": state.tokens,
            "tokens_per_second": self.interval.tokens_per_second(),
        }
        pace = (time.perf_counter() - self.started) / (state.step - self.started_step)
        self.tracker.log_train(record, seconds_left=pace * (train.max_steps - state.step))
        self.interval = Interval()

    def _measure(self) -> None:
        """Measure tau with the runtime; keep the head if it is the best so far."""
        started = time.perf_counter()
        weights = self._weights()

        def act() -> tuple[float, list[float | None]]:
            self.measured.load_state_dict(weights)
            with self.interrupts.released():
                result = measure(self.ground.target, self.measured, self.requests, self.recipe.eval)
            return result.tau, result.alpha

        tau, alpha = on_main(self.accelerator, act)
        state, best = self.state, self.state.best_tau
        if best is None or tau > best:
            state.best_tau, state.best_step = tau, state.step
            on_main(self.accelerator, self._keep_head)
        state.measured_step = state.step
        seconds = time.perf_counter() - started
        state.seconds += seconds
        self.interval.started += seconds
        self.tracker.log_eval(
            {"step": state.step, "tau": tau, "alpha": alpha, "best_tau": state.best_tau, "seconds": seconds}
        )
        shown = " ".join("-" if rate is None else f"{rate:.2f}" for rate in alpha)
        kept = (
            "  (best so far, kept)"
            if state.best_step == state.step
            else f"  (best {state.best_tau:.3f} at step {state.best_step})"
        )
        self.tracker.say(f"step {state.step}  measured tau {tau:.3f}  acceptance by depth {shown}{kept}")

    def _keep_head(self) -> None:
        provenance = {
            **self.provenance,
            "step": self.state.step,
            "tau": self.state.best_tau,
            "measured": self.recipe.eval.model_dump(),
        }
        save_head(self.measured, self.folder.head, target=target_record(self.ground.target), provenance=provenance)  # type: ignore[arg-type]

    def _weights(self) -> dict[str, Tensor]:
        """The whole head's weights; on the main process if they are sharded."""
        if self.accelerator.distributed_type not in SHARDED:
            return self.module.state_dict()
        weights: dict[str, Tensor] = self.accelerator.get_state_dict(self.model)
        return {name.removeprefix("head."): tensor for name, tensor in (weights or {}).items()}

    def _checkpoint(self) -> None:
        if self.saved_step == self.state.step:
            return
        with self.interrupts.held():
            save_checkpoint(
                self.accelerator,
                self.folder.checkpoints,
                self.state,
                self.module,
                self.optimizer,
                keep=self.recipe.train.keep_checkpoints,
            )
        self.saved_step = self.state.step

    def _resume(self) -> None:
        """Take up the newest whole checkpoint, if there is one."""
        found = on_main(self.accelerator, lambda: newest_checkpoint(self.folder.checkpoints, self.tracker.say))
        if found is None:
            return
        path, state = found
        check_continues(path, state, self.state, self.tracker.say)
        load_checkpoint(self.accelerator, path, self.module, self.optimizer)
        self.state, self.saved_step = replace(state, num_threads=self.state.num_threads), state.step
        self.tracker.say(f"resumed from {path}")

    def _write_records(self) -> None:
        self.folder.write_recipe(self.recipe)
        self.provenance = make_provenance(
            self.recipe, self.ground.target, self.state.data, num_processes=self.state.num_processes
        )
        write_json(self.folder.provenance, self.provenance)


def _take_folder(folder: RunFolder, recipe: Recipe) -> None:
    folder.lock()
    folder.check_recipe(recipe)
    remove_leftovers(folder.checkpoints)


def _is_finished(accelerator: Accelerator, recipe: Recipe, folder: RunFolder, tracker: Tracker) -> bool:
    found = on_main(accelerator, lambda: newest_checkpoint(folder.checkpoints, lambda _: None))
    if found is None or found[1].step < recipe.train.max_steps:
        return False
    state = found[1]
    tracker.say(
        f"{folder.path}: finished already, {state.step} steps, best tau {state.best_tau:.3f} at step {state.best_step}"
    )
    return True


def _number(norm: object) -> float | None:
    """A gradient norm as a number: FSDP gives a DTensor, DeepSpeed stage 0 nothing."""
    if norm is None:
        return None
    full = getattr(norm, "full_tensor", None)
    return float(full() if full is not None else norm)  # type: ignore[arg-type]
