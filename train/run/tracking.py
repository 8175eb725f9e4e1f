"""Progress and metrics of a run, on its main process: a bar or lines, metrics.jsonl, and Accelerate's trackers."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from accelerate import Accelerator

from eval.core.command_line import OFF
from eval.core.progress import Progress
from eval.pages.texts import count
from eval.pages.wandb_run import log_outcome, run_place, tags, wandb_mode, wandb_starts
from eval.records.results import named_figures
from eval.records.schema import Results
from heads.core.files import write_text
from train.recipe.recipe import Tracking
from train.run.run_folder import RunFolder

Metrics = dict[str, Any]

DEPTHS = 6
"""Depths of which a line of progress has figures: it stays under 100 letters."""
DIFFERENCE = 0.02
"""Difference of the training step's tau from the measured one, on the same texts, above which a line says so. Rounding
gives less."""


class Tracker:
    """Output of a run: lines on the terminal, `metrics.jsonl`, and the trackers that the recipe enables.

    `metrics.jsonl` is flushed after each line. A tracker may lose the last seconds before a crash.
    """

    def __init__(self, accelerator: Accelerator, folder: RunFolder, settings: Tracking):
        self.accelerator = accelerator
        self.folder = folder
        self.settings = settings
        self.max_steps = 0
        self.main = accelerator.is_main_process
        self.record: dict[str, Any] = {}
        """The recipe's plain settings, which a tracker shows."""
        self._progress: Progress | None = None
        self._file: TextIO | None = None

    def say(self, text: str) -> None:
        if self.main:
            if self._progress is not None:
                self._progress.say(text)
            else:
                print(text, file=sys.stderr, flush=True)

    def start(self, step: int, measured_step: int = 0) -> None:
        """Begin recording after `step`. Lines of later steps and of later measurements, from an interrupted run, are
        dropped."""
        if not self.main:
            return
        last = keep_metrics(self.folder.metrics, step, measured_step)
        self._file = self.folder.metrics.open("a", encoding="utf-8")
        self._start_trackers(step)
        if last > step and wandb_mode(self.settings.wandb) != OFF:
            self.say(
                f"wandb: steps {step + 1} to {last}, which the interrupted run made after its last checkpoint, are "
                "logged again"
            )
        self._progress = Progress("step", self.max_steps, done=step, announced=True, cold=True)

    def advance(self) -> None:
        if self._progress is not None:
            self._progress.advance()

    def log_train(self, metrics: Metrics) -> None:
        self._record({"kind": "train", **metrics})
        if self._progress is None:
            return
        self._progress.log(
            f"loss {metrics['loss']:.3f}, accuracy by depth (%) {by_depth(metrics['accuracy'])}, "
            f"{count(metrics['tokens_per_second'])} tokens/s"
        )

    def log_eval(self, metrics: Metrics, left: int) -> None:
        """`left`: number of measurements to come."""
        self._record({"kind": "eval", **metrics})
        if self._progress is not None:
            self._progress.more = left * metrics["measuring_seconds"]
        best = "best so far, kept"
        if metrics["best_step"] != metrics["step"]:
            best = f"best {metrics['best_tau']:.3f} at step {metrics['best_step']}"
        estimate = metrics["tau_by_training_step"]
        measured = f"measured tau {metrics['tau']:.3f}"
        if estimate is not None and abs(estimate - metrics["tau"]) > DIFFERENCE:
            measured += f", but {estimate:.3f} by the training step on the same texts: training and drafting differ"
        if metrics["is_estimate"]:
            measured = f"tau {metrics['tau']:.3f}, an estimate by the training step on training text"
        self.say(f"step {metrics['step']:,}  {measured}  accepted by depth (%) {by_depth(metrics['alpha'])}  ({best})")

    def log_outcome(self, results: Results) -> None:
        """Record the measurement of the finished head with the trackers. Start them again if an earlier process did the
        training."""
        if not self.main:
            return
        if not self.accelerator.trackers:
            self._start_trackers(self.max_steps)
        for tracker in self.accelerator.trackers:
            if tracker.name == "wandb":
                log_outcome(tracker.tracker, results, self.folder.path, head=self.folder.head)
            else:
                tracker.log(named_figures(results.headline), step=self.max_steps)

    def stop(self) -> None:
        """Close the bar and `metrics.jsonl`. Trackers stay open for the final measurement. May be called twice."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def finish(self, *, code: int = 0) -> None:
        """Close everything. May be called twice."""
        self.stop()
        for tracker in self.accelerator.trackers:
            if tracker.name == "wandb":
                tracker.tracker.finish(exit_code=code)
                if tracker.tracker.offline:
                    self.say(run_place(tracker.tracker))
            else:
                tracker.finish()
        self.accelerator.trackers = []

    def _start_trackers(self, step: int) -> None:
        """Start the trackers of a run that has made `step` steps. A resumed run continues its wandb run."""
        if not self.accelerator.log_with:
            return
        settings = self.settings
        record = self.record
        id_file = self.folder.path / "wandb-id"
        mode = wandb_mode(settings.wandb)
        project = settings.project or os.environ.get("WANDB_PROJECT") or "draftsmith"
        named = {"name": settings.name or os.environ.get("WANDB_NAME") or self.folder.path.name, "config": record}
        with wandb_starts(mode, self.folder.path) as shared:
            wandb_options = {
                "id": id_file.read_text().strip() if id_file.is_file() else None,
                "resume": "allow" if mode == "online" else None,
                "tags": tags(record["head"]["kind"], record["target"]["path"]),
            }
            options = {
                "wandb": {**named, **shared, **wandb_options},
                "tensorboard": {"purge_step": step + 1},  # hides what an interrupted run wrote after its checkpoint
                "trackio": {**named, "resume": "allow" if step else "never"},  # it knows runs by name alone
            }
            try:
                self.accelerator.init_trackers(project, init_kwargs=options)
            except Exception:
                self.accelerator.trackers = []  # the list holds trackers that did not start
                raise
        if mode != OFF:
            run = self.accelerator.get_tracker("wandb", unwrap=True)
            run.define_metric("eval/*", step_metric="eval/tokens")  # learning curves
            write_text(id_file, run.id + os.linesep)
            if mode == "online":
                self.say(run_place(run))

    def _record(self, metrics: Metrics) -> None:
        if self._file is not None:
            self._file.write(json.dumps(metrics) + "\n")
            self._file.flush()
        self.accelerator.log(flat(metrics), step=metrics["step"])


def by_depth(rates: Sequence[float | None]) -> str:
    """Return the rates of the first depths in percent, as many as a line of progress has room for."""
    shown = ["-" if rate is None else f"{100 * rate:.0f}" for rate in rates[:DEPTHS]]
    return " ".join([*shown, "..."] if len(rates) > DEPTHS else shown)


def keep_metrics(path: Path, step: int, measured_step: int) -> int:
    """Drop lines of later steps and measurements and damaged lines, so that a resumed run records all once. Return the
    last step that had a line."""
    if not path.is_file():
        return 0
    last = 0
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            last = max(last, record["step"])
            if record["step"] <= (measured_step if record["kind"] == "eval" else step):
                lines.append(line.decode() + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    write_text(path, "".join(lines))
    return last


def flat(metrics: Metrics) -> dict[str, float]:
    """Return scalars, named `train/...` or `eval/...`. A list gives one scalar per depth, counted from 1, for the
    depths that have a value."""
    out: dict[str, float] = {}
    figures = metrics | {f"tau/{suite}": values["tau"] for suite, values in metrics.get("suites", {}).items()}
    if metrics.get("ci95"):
        figures["tau_low"], figures["tau_high"] = metrics["ci95"]
    for name, value in figures.items():
        each = {f"_{depth}": part for depth, part in enumerate(value, 1)} if isinstance(value, list) else {"": value}
        numbers = {end: part for end, part in each.items() if isinstance(part, int | float)}
        out |= {f"{metrics['kind']}/{name}{end}": part for end, part in numbers.items()}
    return out
