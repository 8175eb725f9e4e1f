"""An open run: its folder, its processes, its tracker, and the signals that may stop it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from train.checkpointing import begun_in
from train.data.loading import Data, has_date
from train.data.reader import Reader
from train.data.templates import ChatTemplate
from train.interrupts import Interrupts
from train.launch import die_with_launcher, make_accelerator, on_main
from train.recipe import Recipe
from train.run_folder import RunFolder
from train.tracker import Tracker


@dataclass(frozen=True)
class Run:
    """The parts of a run that all its code may use."""

    folder: RunFolder
    accelerator: Accelerator
    tracker: Tracker
    interrupts: Interrupts


@contextmanager
def open_run(recipe: Recipe) -> Iterator[Run]:
    """Open a recipe's run for a `with` block: lock its folder, and create the Accelerator and the tracker."""
    die_with_launcher()
    with Interrupts() as interrupts:
        folder = RunFolder(Path(recipe.output_dir))
        accelerator = make_accelerator(recipe.train, begun_in(folder.checkpoints), recipe.tracking, folder.path)
        tracker = Tracker(accelerator, folder, recipe.tracking, recipe.train.max_steps)
        try:
            on_main(accelerator, folder.lock)
            yield Run(folder, accelerator, tracker, interrupts)
        finally:
            tracker.finish(code=1)  # has no effect after a run that succeeded
            folder.unlock()


def open_reader(data: Data, tokenizer: PreTrainedTokenizerBase, run: Run) -> Reader:
    """Return the reader of a run's data sources. A chat template that prints the date gets the day on which the run
    began."""
    rendering = ChatTemplate(tokenizer, arguments=data.template)
    if has_date(data, rendering):
        rendering = replace(rendering, day=on_main(run.accelerator, run.folder.first_day))
    return Reader(rendering, run.accelerator, run.tracker.say)
