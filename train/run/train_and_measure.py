"""One training run: from a recipe to a trained head and its final measurement."""

from rich.console import Console

from eval.data.prompts import absolute_prompts
from eval.measure.bench_heads import bench_heads
from eval.measure.machine import versions
from eval.pages.run_report import save_and_print, write_report
from eval.records.acceptance_profile import ACCEPTANCE, acceptance_profile
from eval.records.journal import keep_journal
from eval.records.results import read_results, write_record
from eval.records.schema import Results
from heads.core.errors import UserError
from heads.formats.engine_folder import why_unfit
from heads.saved import check_loaders, load_head, weights_hash
from train.core.interrupts import Interrupted, Interrupts
from train.core.processes import LOST_PROCESS, on_main
from train.recipe.recipe import Eval, Recipe, load_recipe, plain_settings
from train.run.open_run import Run, open_run
from train.run.run_folder import RunFolder
from train.run.training_loop import Outcome, fit


def train(recipe: Recipe) -> Results | None:
    """Train the head of a recipe, or continue the run in its folder, and measure the best head.

    Return the contents of the folder's results.json, on every process; None if the main process had no room for the
    whole target, so that nothing was decoded. UserError for what a user can mend. An interrupt leaves a checkpoint and
    raises KeyboardInterrupt.
    """
    try:
        with open_run(recipe) as run:
            outcome = fit(recipe, run)
            with Interrupts():
                return measure_best(outcome, run)
    except RuntimeError as error:
        if any(text in str(error) for text in LOST_PROCESS):
            raise UserError(
                "another process of this launch has ended; the same command goes on from the newest checkpoint"
            ) from error
        raise
    except Interrupted as interrupted:
        raise Interrupted(f"{interrupted}; the same command goes on from there") from None


def measure_best(outcome: Outcome, run: Run) -> Results | None:
    """Return the measurement of the best head, which may be that of an earlier run with the same settings."""
    (recipe, features, tokenizer), folder, tracker = outcome, run.folder, run.tracker

    def act() -> Results | None:
        if (doubt := why_unfit(check_loaders(folder.head), recipe.head.serve)) is not None:
            tracker.say(f"{folder.head}: {doubt}")
        if is_measured(folder, recipe.eval):
            results = read_results(folder.results)
            if not folder.card.is_file():  # the last file of a report: writing it was interrupted
                write_report(results, folder.path)
                tracker.log_outcome(results)
            tracker.say(f"measured already; see {folder.path / 'report.html'}")
            return results
        if not features.measures:
            tracker.say(
                f"{folder.head}: tau is an estimate and nothing was decoded, so there is no report; to measure it, run "
                f"python eval/bench.py {folder.path} where there is room for the target"
            )
            return None
        report = recipe.eval.final()
        tracker.say(f"next: the final measurement of {', '.join(report.trees)}; it writes {folder.path}/report.html")
        about = {"head": weights_hash(folder.head), "settings": report.model_dump(), "versions": versions()}
        with keep_journal(folder.path, about) as journal, features.whole() as target:
            head = load_head(folder.head, dtype=target.dtype, device=target.device)
            results = bench_heads(target, {str(folder.head): head}, tokenizer, report, journal=journal)
        save_and_print(results, folder.path, Console())
        if (profile := acceptance_profile(results)) is not None:
            write_record(profile, folder.head / ACCEPTANCE)
        tracker.log_outcome(results)
        folder.write_recipe(plain_settings(recipe))
        return results

    results = on_main(run.accelerator, act)
    tracker.finish(code=0 if results is None or results.is_exact else 1)
    return results


def is_measured(folder: RunFolder, settings: Eval) -> bool:
    """Return True if the folder's results are of its current head and were measured with these settings."""
    if not folder.results.is_file():
        return False
    try:
        measured = read_results(folder.results).head.sha256
    except UserError:  # a damaged file counts as no results
        return False
    was = load_recipe(folder.recipe).eval.final()
    now = settings.final()
    was, now = (each.model_copy(update={"prompts": absolute_prompts(each.prompts)}) for each in (was, now))
    return bool(measured == weights_hash(folder.head)) and was == now
