"""fit(recipe): the one training loop, for every kind of head: steps, measurements, checkpoints, and going on."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from eval.benchmark.contention import contention
from eval.benchmark.environment import setup_line
from eval.command import tell
from eval.files import write_json
from eval.runtime.engine import Request
from heads.base import DraftHead
from heads.checkpoint import save_head, target_record
from heads.draft_model import Draft
from heads.errors import UserError
from train.adapter import Joint, check_adapter, make_adapter
from train.checkpointing import (
    RunState,
    begun_in,
    check_continues,
    load_checkpoint,
    newest_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from train.interrupts import Interrupted, Interrupts
from train.interval import Interval, Pace, check_finite
from train.launch import SHARDED, die_with_launcher, make_accelerator, on_main
from train.lora import add_adapters, merged_weights
from train.measuring import Measured, load_requests, measure, nodes_needed
from train.optim import lr_factor
from train.recipe import Recipe
from train.run_folder import RunFolder
from train.setup import (
    LoadedTarget,
    check_head,
    check_supervision,
    load_data,
    load_recipe_target,
    load_samples,
    make_head,
    make_provenance,
    with_head_defaults,
)
from train.step import Stepper
from train.tracker import Tracker

Checkpoint = tuple[Path, RunState]


@dataclass(frozen=True)
class Outcome:
    """What `fit` leaves to its caller: the recipe with its head's defaults, the run folder, and the target still in
    memory."""

    recipe: Recipe
    folder: RunFolder
    loaded: LoadedTarget
    accelerator: Accelerator
    tracker: Tracker


def fit(recipe: Recipe) -> Outcome:
    """Train the recipe's head, or go on where an earlier run of the same recipe stopped.

    Raises UserError for what a user can mend, and Interrupted when told to stop, a resumable checkpoint written.
    """
    die_with_launcher()
    with Interrupts() as interrupts:
        folder = RunFolder(Path(recipe.output_dir))
        accelerator = make_accelerator(recipe.train, begun_in(folder.checkpoints))
        tracker = Tracker(recipe, folder, main=accelerator.is_main_process)
        try:
            on_main(accelerator, folder.lock)
            loaded = load_recipe_target(accelerator, recipe)
            tracker.say(setup_line(loaded.target, {"no": "fp32"}.get(accelerator.mixed_precision, "bf16")))
            drafts = check_head(recipe, loaded.target)
            recipe = tracker.recipe = with_head_defaults(recipe, drafts)
            found = on_main(accelerator, lambda: _take_up(folder, recipe, tracker))
            outcome = Outcome(recipe, folder, loaded, accelerator, tracker)
            if accelerator.num_processes == 1:  # each other's threads are no others'
                tell(contention(accelerator.device))
            if found is not None and found[1].step >= recipe.train.max_steps:
                best = f"best tau {found[1].best_tau:.3f} at step {found[1].best_step}"
                tracker.say(f"{folder.path}: finished already, {found[1].step} steps, {best}")
            else:
                training = Training(outcome, drafts, interrupts)
                del drafts  # the run has no room for a second head
                training.run(found)
            return outcome
        except BaseException:
            tracker.finish(code=1)
            folder.unlock()
            raise


def _take_up(folder: RunFolder, recipe: Recipe, tracker: Tracker) -> Checkpoint | None:
    """What an earlier run of the same recipe left in the folder to go on from."""
    folder.check_recipe(recipe)
    remove_leftovers(folder.checkpoints)
    return newest_checkpoint(folder.checkpoints, tracker.say)


class Training:
    """One run, from its data to its last step."""

    def __init__(self, run: Outcome, drafts: DraftHead, interrupts: Interrupts):
        """`drafts`: a head such as will be trained, to be asked what it can draft."""
        recipe = run.recipe
        self.recipe, self.interrupts = recipe, interrupts
        self.folder, self.accelerator, self.tracker = run.folder, run.accelerator, run.tracker
        self.target = run.loaded.target
        nodes = nodes_needed(recipe.eval, drafts)
        self.requests: Sequence[Request] = load_requests(
            recipe.eval, run.loaded.tokenizer, self.target.context_length, nodes
        )
        if recipe.target.adapter is not None:
            if run.accelerator.distributed_type in SHARDED:
                raise UserError("target.adapter: is not cut up by DeepSpeed or FSDP; launch without them")
            check_adapter(self.target, recipe.target.adapter, drafts)
        mixture = load_data(run.accelerator, recipe, run.loaded, run.folder, run.tracker)
        head = make_head(recipe, self.target, mixture)
        # What is measured and saved is one thing: the weights in the target's dtype.
        self.measured = copy.deepcopy(head).to(self.target.dtype).eval()
        add_adapters(head)
        self.samples = load_samples(recipe, run.loaded, mixture, run.folder)
        self.head, self.adapter, trained = head, None, head
        if recipe.target.adapter is not None:
            self.adapter = make_adapter(self.target, recipe.target.adapter, recipe.train.seed)
            trained = Joint(head, self.adapter)
        self.stepper = Stepper(trained, self.target, mixture, run.accelerator, recipe.train)
        check_supervision(self.stepper.head, mixture)
        self.state = RunState(
            data=mixture.digest(),
            num_processes=run.accelerator.num_processes,
            num_threads=torch.get_num_threads(),
            precision=run.accelerator.mixed_precision,
        )
        self.saved_step: int | None = None
        self.samples_of = 0
        """The step whose samples the mixture holds."""

    def run(self, found: Checkpoint | None) -> None:
        """Steps, measurements and checkpoints up to `max_steps`, from a checkpoint on if there is one."""
        if found is not None:
            self._resume(*found)
        self.tracker.start(self.state.step)
        on_main(self.accelerator, self._write_records)
        self.interval = Interval.resumed(self.state.interval, self.accelerator)
        self.pace, self.started_step = Pace(self.state.step), self.state.step
        with self.interrupts.held():
            try:
                self._between_steps()
                while self.state.step < self.recipe.train.max_steps:
                    self._renew_samples()
                    self._step()
                    self._between_steps()
            except Interrupted:
                self._checkpoint()
                raise Interrupted(f" at step {self.state.step}") from None
        self.tracker.stop()
        state = self.state
        best = f"best head: tau {state.best_tau:.3f} at step {state.best_step}, in {self.folder.head}"
        self.tracker.say(f"trained {state.step} steps in {state.seconds:.0f} s; {best}")

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
        """One optimizer step, and its line in the log where one is due."""
        state, train = self.state, self.recipe.train
        started = time.perf_counter()
        state.tokens += self.stepper.step(state.step, self.interval, stop=self.interrupts.asked)
        state.step += 1
        self.tracker.advance()
        if state.step == self.started_step + 1:
            self.pace.mark(state.step)
        if state.step % train.log_every == 0 or state.step == train.max_steps:
            self._log()
        state.seconds += time.perf_counter() - started

    def _log(self) -> None:
        """Record the interval and begin a new one."""
        state, train = self.state, self.recipe.train
        averages = self.interval.averages(self.accelerator, self.stepper.weights)
        check_finite(averages["loss"], state.step)
        record = {
            "step": state.step,
            **averages,
            "lr": train.lr * lr_factor(state.step - 1, train),
            "grad_norm": self.stepper.grad_norm(),
            "tokens": state.tokens,
            "tokens_per_second": self.interval.tokens_per_second(),
        }
        self.pace.mark(state.step)
        steps = train.max_steps - state.step
        measurements = 1 if train.eval_every is None else -(-train.max_steps // train.eval_every)
        measurements -= state.step // train.eval_every if train.eval_every else 0
        self.tracker.log_train(record, seconds_left=self.pace.seconds_left(steps, measurements))
        self.interval = Interval()

    def _measure(self) -> None:
        """Measure tau with the runtime; keep the head if it is the best so far."""
        started = time.perf_counter()
        weights = self._weights()

        def act() -> Measured:
            self.measured.load_state_dict(weights)
            with self.interrupts.released():
                return measure(self.target, self.measured, self.requests, self.recipe.eval)

        found, state = on_main(self.accelerator, act), self.state
        if state.best_tau is None or found.tau > state.best_tau:
            state.best_tau, state.best_step = found.tau, state.step
            on_main(self.accelerator, self._keep_head)
        state.measured_step = state.step
        seconds = time.perf_counter() - started
        state.seconds += seconds
        self.interval.leave_out(seconds)
        self.pace.measured(seconds)
        self.tracker.log_eval(
            {
                "step": state.step,
                "tau": found.tau,
                "tau_by_training_step": found.estimate,
                "alpha": found.alpha,
                "best_tau": state.best_tau,
                "best_step": state.best_step,
                "seconds": seconds,
            }
        )

    def _weights(self) -> dict[str, Tensor]:
        """The head's weights as they are measured and saved."""
        return merged_weights(self.head, self.stepper.whole_weights())

    def _renew_samples(self) -> None:
        """Let the draft write what the coming steps learn from, where that is due."""
        samples, step = self.samples, self.state.step
        if samples is None or (begin := samples.begin(step)) == self.samples_of:
            return
        if begin == step > 0:
            started, weights = time.perf_counter(), self._weights()

            def act() -> None:
                if samples.file(begin).is_file():
                    return  # the run was interrupted after it had written them
                self.measured.load_state_dict(weights)
                with self.interrupts.released():
                    tokens = samples.write(begin, cast(Draft, self.measured), self.target)
                self.tracker.say(f"data.on_policy: step {begin}: {samples.settings.samples} samples, {tokens} tokens")

            on_main(self.accelerator, act)
            seconds = time.perf_counter() - started
            self.state.seconds += seconds
            self.interval.leave_out(seconds)
        self.stepper.mixture, self.samples_of = samples.mixture(begin), begin

    def _keep_head(self) -> None:
        provenance = {
            **self.provenance,
            "step": self.state.step,
            "tau": self.state.best_tau,
            "measured": self.recipe.eval.model_dump(),
        }
        save_head(
            self.measured,
            self.folder.head,
            target=target_record(self.target),
            provenance=provenance,
            write_adapter=None if self.adapter is None else self.adapter.save,
        )

    def _checkpoint(self) -> None:
        if self.saved_step == self.state.step:
            return
        self.state.interval = self.interval.cut(self.accelerator)
        with self.interrupts.held():
            save_checkpoint(
                self.accelerator,
                self.folder.checkpoints,
                self.state,
                self.stepper.module,
                self.stepper.optimizer,
                keep=self.recipe.train.keep_checkpoints,
            )
        self.saved_step = self.state.step

    def _resume(self, path: Path, state: RunState) -> None:
        """Take up a checkpoint."""
        check_continues(path, state, self.state, len(self.stepper.weights), self.tracker.say)
        load_checkpoint(self.accelerator, path, self.stepper.module, self.stepper.optimizer)
        self.state, self.saved_step = replace(state, num_threads=self.state.num_threads), state.step
        self.tracker.say(f"resumed from {path}")

    def _write_records(self) -> None:
        self.folder.write_recipe(self.recipe)
        self.provenance = make_provenance(
            self.recipe, self.target, self.state.data, num_processes=self.state.num_processes
        )
        write_json(self.folder.provenance, self.provenance)
