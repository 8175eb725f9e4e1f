"""The training loop of every kind of head: steps, measurements, checkpoints and resuming. See `fit`."""

import copy
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from eval.core.command_line import print_line
from eval.core.progress import Progress
from eval.data.template_arguments import with_arguments
from eval.measure.machine import settle_threads, setup_line
from eval.records.head_schema import TauFigures
from eval.records.provenance import Provenance
from heads.core.contract import DraftHead
from heads.core.errors import UserError
from heads.saved import save_head, target_record
from train.core.interrupts import Interrupted
from train.core.processes import on_main
from train.data.on_policy import Samples
from train.data.packing import Mixture
from train.data.prepare import load_data
from train.features.feature_source import FeatureSource
from train.recipe.head_section import make_head, resolved_head
from train.recipe.recipe import MAX_EPOCHS, Recipe, Train, plain_settings, with_steps
from train.run.checkpoints import (
    RunState,
    check_continues,
    left_behind,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    save_measurement,
)
from train.run.checks import check_fit
from train.run.open_run import Run, open_reader, open_source
from train.run.tau_measurement import Evaluation
from train.steps.accelerate_launch import wanted_mode
from train.steps.draft_lora import add_adapters
from train.steps.learning_rate import learning_rate
from train.steps.parallel import LossModule
from train.steps.stepper import Interval, Stepper, rows_per_step


class Outcome(NamedTuple):
    """The result of a run: its recipe with the head's settings filled in, and the target, still in memory."""

    recipe: Recipe
    features: FeatureSource
    tokenizer: PreTrainedTokenizerBase


def fit(recipe: Recipe, run: Run) -> Outcome:
    """Train the head of a recipe, or resume an earlier run of the same recipe.

    Each part gets its own section of the recipe. Raises Interrupted if the run is asked to stop, after it has written a
    checkpoint to resume from.
    """
    accelerator, tracker = run.accelerator, run.tracker
    seed = recipe.train.seed
    rows = rows_per_step(recipe.train, recipe.data.context_length, accelerator.num_processes)

    # Target. It determines the settings of `head` that the recipe leaves out.
    features, tokenizer = open_source(recipe.features, recipe, accelerator, tracker.say)
    target = features.target
    asking = with_arguments(tokenizer, target.template)
    tracker.say(setup_line(target, {"no": "fp32"}.get(accelerator.mixed_precision, "bf16")))
    if accelerator.num_processes == 1:  # a process of a larger launch would report the other ones
        print_line(settle_threads(accelerator.device))
    section = recipe.head
    unfilled = make_head(section, target, torch.zeros(target.vocab_size, dtype=torch.int64))
    check_fit(recipe, target, unfilled)
    asked = recipe.model_copy(update={"head": resolved_head(section, unfilled.config)})
    epochs = asked.train.epochs
    steps = asked.train.steps if epochs is None else on_main(accelerator, run.folder.max_steps)
    if steps is not None:
        recipe = _settled(asked, steps, run)
    checkpoint = on_main(accelerator, lambda: newest_checkpoint(run.folder.checkpoints, tracker.say))
    if checkpoint is not None:
        rows = checkpoint[1].rows  # the earlier run may have had another number of processes
        if epochs is None and _is_finished(run, checkpoint[1], recipe.train.steps):
            return Outcome(recipe, features, asking)
    evaluation = Evaluation(recipe.eval, features, asking, unfilled)

    # Data
    reader = open_reader(recipe, target, tokenizer, run)
    mixture, samples = load_data(recipe.data, seed, unfilled, target, reader, run.folder.path)
    features.check(mixture, unfilled.aux_layer_ids)
    del unfilled  # free its memory
    data = mixture.digest()

    # Steps
    if epochs is not None and (checkpoint is None or checkpoint[1].data == data or steps is None):
        recipe = _settled(asked, max(1, math.ceil(epochs * mixture.num_rows / rows)), run)
    tracker.say(describe_length(recipe, mixture, rows))
    if recipe.train.warmup_steps < asked.train.warmup_steps:
        tracker.say(
            f"train.warmup_steps: {asked.train.warmup_steps:,} are more than a fifth of the run; the warm-up takes "
            f"{recipe.train.warmup_steps:,} steps"
        )
    outcome = Outcome(recipe, features, asking)
    if checkpoint is not None and _is_finished(run, checkpoint[1], recipe.train.steps):
        return outcome

    # Head, in float32 and equal on all processes. A copy in the target's dtype is measured and saved, rounded before.
    counts = mixture.label_counts(target.vocab_size)
    torch.manual_seed(seed)
    with Progress("computing the initial weights of the head"):
        head: nn.Module = make_head(section, target, counts).to(target.device, torch.float32)
    if (vocabulary := cast(DraftHead, head).vocabulary) is not None and len(vocabulary) < len(counts):
        share = float(counts[vocabulary.cpu()].sum() / counts.sum().clamp(min=1))
        tracker.say(f"{len(vocabulary):,} of {len(counts):,} tokens can be drafted, {share:.1%} of the labels")
    if section.init_from is not None and (line := left_behind(Path(section.init_from))) is not None:
        tracker.say(line)
    if started := cast(DraftHead, head).started:
        tracker.say(f"head.init_from: {started}")
    measured = copy.deepcopy(head).to(target.dtype).eval()
    add_adapters(cast(DraftHead, head))

    # Loop
    if recipe.train.optimizer == "muon" and wanted_mode() == "deepspeed":
        tracker.say("train.optimizer: AdamW in place of Muon, whose updates DeepSpeed would clip and scale otherwise")
    stepper = Stepper(recipe.train, LossModule(head), features, mixture, accelerator, rows)
    training = Training(recipe.train, run, stepper, measured, evaluation, samples, data)
    if checkpoint is not None:
        training.resume(*checkpoint)
    tracker.start(training.state.step, training.state.measured_step or 0)
    training.provenance = on_main(
        accelerator,
        lambda: run.folder.write_provenance(tracker.record, data, target, accelerator.num_processes),
    )
    try:
        training.run()
    finally:
        features.close()
    return outcome


def _settled(recipe: Recipe, steps: int, run: Run) -> Recipe:
    """Return the recipe of a run of so many steps, which the tracker shows. UserError if the folder's run had other
    settings."""
    recipe = with_steps(recipe, steps)
    run.tracker.max_steps = steps
    run.tracker.record = plain_settings(recipe)
    on_main(run.accelerator, lambda: run.folder.check_recipe(run.tracker.record))
    return recipe


def _is_finished(run: Run, state: RunState, steps: int) -> bool:
    """Return True for a run that has made and measured its last step, and say so."""
    if state.step < steps or state.step != state.measured_step:
        return False
    best = f"best tau {state.best_tau:.3f} at step {state.best_step}"
    run.tracker.say(f"{run.folder.path}: finished already, {state.step} steps, {best}")
    return True


def describe_length(recipe: Recipe, mixture: Mixture, rows: int) -> str:
    """Return one line with the size of the data and the length of a run with `rows` rows a step. UserError if the run
    reads its data too often."""
    steps, tokens = recipe.train.steps, rows * recipe.data.context_length
    epochs = steps * rows / mixture.num_rows
    is_chat = all(source.kind == "chat" for source in recipe.data.sources)
    texts = f"{mixture.num_texts:,} {'conversation' if is_chat else 'text'}{'s' if mixture.num_texts != 1 else ''}"
    if steps > 1 and epochs > MAX_EPOCHS:
        most = max(1, MAX_EPOCHS * mixture.num_rows // rows)
        raise UserError(
            f"train.max_steps: {steps:,} steps of {tokens:,} tokens read {texts} {epochs:,.0f} times, expected at most "
            f"{MAX_EPOCHS:,} times: give train.max_steps='10 epochs', or {most} at most"
        )
    return f"{mixture.num_rows:,} rows: {steps:,} steps of {tokens:,} tokens are {epochs:.3g} epochs"


class Training:
    """The training steps of a run, with its measurements and checkpoints."""

    def __init__(
        self,
        settings: Train,
        run: Run,
        stepper: Stepper,
        measured: nn.Module,
        evaluation: Evaluation,
        samples: Samples | None,
        data: str,
    ):
        """`measured`: a copy of the head, into which the weights are loaded to measure and save them. `data`: the hash
        of the training data."""
        self.settings, self.stepper, self.measured = settings, stepper, measured
        self.dtype: torch.dtype = getattr(torch, settings.save_dtype)
        self.evaluation, self.samples, self.target = evaluation, samples, stepper.target
        self.folder, self.tracker, self.interrupts = run.folder, run.tracker, run.interrupts
        self.accelerator = run.accelerator
        self.state = RunState(
            data=data,
            num_processes=self.accelerator.num_processes,
            num_threads=torch.get_num_threads(),
            rows=stepper.rows,
            precision=self.accelerator.mixed_precision,
        )
        self.measured_steps = settings.measured_steps
        self.provenance = Provenance()
        self.saved_step = 0
        """The step of the newest checkpoint. Before the first step there is nothing to save."""
        self.interval = Interval()
        self.samples_of = 0
        """The step at which the samples in the mixture were written."""

    def resume(self, path: Path, state: RunState) -> None:
        check_continues(path, state, self.state, len(self.stepper.weights), self.tracker.say)
        load_checkpoint(self.stepper.strategy, path)
        now = self.state
        self.state = replace(state, num_processes=now.num_processes, num_threads=now.num_threads)
        self.saved_step = state.step
        self.tracker.say(f"resumed from {path}")

    def run(self) -> None:
        """Train up to the last step, with the measurements and checkpoints in between."""
        self.interval = Interval.resumed(self.state.interval, self.accelerator)
        with self.interrupts.held():
            try:
                self._between_steps()
                while self.state.step < self.settings.steps:
                    self._renew_samples()
                    self._step()
                    self._between_steps()
            except Interrupted:
                self._checkpoint()
                raise Interrupted(f" at step {self.state.step}") from None
        self.tracker.stop()
        state = self.state
        tau = "tau" if self.stepper.features.measures else "estimated tau"
        best = f"best head: {tau} {state.best_tau:.3f} at step {state.best_step}, in {self.folder.head}"
        self.tracker.say(f"trained {state.step} steps in {state.seconds:.0f} s; {best}")

    def _between_steps(self) -> None:
        """Write a checkpoint and measure the head, if either is due after `state.step` steps. The checkpoint comes
        first, so a measurement that fails loses no step."""
        step = self.state.step
        measuring = step in self.measured_steps and self.state.measured_step != step
        if measuring or (step > 0 and step % self.settings.checkpoint_every == 0):
            self._checkpoint()
        if measuring:
            self._measure()

    def _step(self) -> None:
        state, train = self.state, self.settings
        started = time.perf_counter()
        state.tokens += self.stepper.step(state.step, self.interval, stop=self.interrupts.asked)
        state.step += 1
        self.tracker.advance()
        if state.step % train.log_every == 0 or state.step in (1, train.steps):
            self._log()
        state.seconds += time.perf_counter() - started

    def _log(self) -> None:
        state, train = self.state, self.settings
        self.interval.check(self.accelerator, state.step)
        averages = self.interval.averages(self.accelerator, self.stepper.weights)
        self.tracker.log_train(
            {
                "step": state.step,
                **averages,
                "lr": learning_rate(state.step - 1, train),
                "grad_norm": float(self.stepper.norm),
                "tokens": state.tokens,
                "tokens_per_second": self.interval.tokens_per_second(),
            }
        )
        self.interval = Interval()

    def _measure(self) -> None:
        """Measure tau with the runtime, or estimate it. Keep the head if it is the best so far."""
        started = time.perf_counter()
        weights = self.stepper.head_weights()

        def act() -> TauFigures | None:
            self.measured.load_state_dict(weights)
            cast(DraftHead, self.measured).round_to(self.dtype)
            with self.interrupts.released():
                return self.evaluation.measure(self.measured) if self.stepper.features.measures else None

        measurement, state = on_main(self.accelerator, act), self.state
        if measurement is None:
            behind = self.settings.steps * self.stepper.rows  # the first row after those of the last step
            measurement = self.evaluation.estimate(self.measured, self.stepper.mixture, behind, self.accelerator)
        if state.best_tau is None or measurement.tau > state.best_tau:
            state.best_tau, state.best_step = measurement.tau, state.step
            on_main(self.accelerator, self._keep_head)
        state.measured_step = state.step
        seconds = time.perf_counter() - started
        self.interval.started += seconds
        self.tracker.log_eval(
            {
                "step": state.step,
                "tokens": state.tokens,
                "seconds": state.seconds,
                "lr": learning_rate(state.step - 1, self.settings),
                **measurement.model_dump(),
                "best_tau": state.best_tau,
                "best_step": state.best_step,
                "measuring_seconds": seconds,
            },
            left=sum(step > state.step for step in self.measured_steps),
        )
        on_main(self.accelerator, lambda: save_measurement(self.folder.checkpoints, state))

    def _renew_samples(self) -> None:
        """Generate the samples for the next steps, if new ones are due."""
        samples, state, step = self.samples, self.state, self.state.step
        if samples is None or (begin := samples.begin(step)) == self.samples_of:
            return
        if begin == step > 0:
            started, weights = time.perf_counter(), self.stepper.head_weights()

            def act() -> None:
                self.measured.load_state_dict(weights)  # not rounded: training does not depend on `save_dtype`
                with self.interrupts.released():
                    tokens = samples.write(begin, cast(DraftHead, self.measured), self.target)
                self.tracker.say(f"data.on_policy: step {begin}: {samples.settings.samples} samples, {tokens} tokens")

            on_main(self.accelerator, act)
            seconds = time.perf_counter() - started
            state.seconds += seconds
            self.interval.started += seconds
        texts = on_main(self.accelerator, lambda: samples.read(begin))
        self.stepper.mixture = samples.mixture(begin, texts)
        self.samples_of = begin

    def _keep_head(self) -> None:
        state = self.state
        how: dict[str, object] = {"estimated": "by the training step, on training text"}
        if self.stepper.features.measures:
            how = {"measured": self.evaluation.settings.model_dump()}
        made = {"step": state.step, "tokens": state.tokens, "tau": state.best_tau, **how}
        provenance = self.provenance.model_copy(update=made).model_dump(exclude_unset=True)
        record = target_record(self.target)
        save_head(self.measured, self.folder.head, target=record, provenance=provenance, dtype=self.dtype)

    def _checkpoint(self) -> None:
        if self.saved_step == self.state.step:
            return
        self.interval.check(self.accelerator, self.state.step)
        self.state.interval = self.interval.cut(self.accelerator)
        with self.interrupts.held():
            save_checkpoint(
                self.stepper.strategy, self.folder.checkpoints, self.state, keep=self.settings.keep_checkpoints
            )
        self.saved_step = self.state.step
