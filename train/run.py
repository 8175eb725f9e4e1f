"""One training run: from a recipe to a trained head and its final measurement."""

from eval.bench import run_bench
from eval.measure.acceptance_profile import ACCEPTANCE, acceptance_profile
from eval.measure.prompts import absolute_prompts
from eval.measure.results import read_results, write_record
from eval.pages.report import write_report
from heads.core.errors import UserError
from heads.formats.engine_folder import why_unfit
from heads.saved import check_loaders, load_head, weights_hash
from train.core.interrupts import Interrupted, Interrupts
from train.core.processes import is_lost_process, on_main, tell_first
from train.loop import Outcome, fit
from train.open_run import Run, open_run
from train.recipe import Eval, Recipe, load_recipe, plain_settings
from train.run_folder import RunFolder


def train_head(recipe: Recipe) -> int:
    try:
        with open_run(recipe) as run:
            outcome = fit(recipe, run)
            with Interrupts():
                return finish(outcome, run)
    except RuntimeError as error:
        if is_lost_process(error):
            raise UserError(
                "another process of this launch has ended; the same command goes on from the newest checkpoint"
            ) from error
        raise
    except Interrupted as interrupted:
        tell_first(f"interrupted{interrupted}; the same command goes on from there")
        return 130


def finish(outcome: Outcome, run: Run) -> int:
    """Measure the best head, unless an earlier run did so with the same settings. Return 1 if an output diverged from
    the target's."""
    (recipe, features, tokenizer), folder, tracker = outcome, run.folder, run.tracker

    def act() -> int:
        if (doubt := why_unfit(check_loaders(folder.head))) is not None:
            tracker.say(f"{folder.head}: {doubt}")
        if is_measured(folder, recipe.eval):
            if not folder.card.is_file():  # the last file of a report: writing it was interrupted
                results = read_results(folder.results)
                write_report(results, folder.path)
                tracker.log_outcome(results)
            tracker.say(f"measured already; see {folder.path / 'report.html'}")
            return 0
        if not features.measures:
            tracker.say(
                f"{folder.head}: tau is an estimate and nothing was decoded, so there is no report; to measure it, run "
                f"python eval/bench.py {folder.path} where there is room for the target"
            )
            return 0
        report = recipe.eval.final()
        tracker.say(f"next: the final measurement of {', '.join(report.trees)}; it writes {folder.path}/report.html")
        with features.whole() as target:
            head = load_head(folder.head, dtype=target.dtype, device=target.device)
            results = run_bench(target, {str(folder.head): head}, tokenizer, report, out=folder.path)
        if (profile := acceptance_profile(results)) is not None:
            write_record(profile, folder.head / ACCEPTANCE)
        tracker.log_outcome(results)
        folder.write_recipe(plain_settings(recipe))
        return 0 if results.is_exact else 1

    code = on_main(run.accelerator, act)
    tracker.finish(code=code)
    return code


def is_measured(folder: RunFolder, settings: Eval) -> bool:
    """Return True if the folder's results are of its current head and were measured with these settings."""
    if not folder.results.is_file():
        return False
    try:
        measured = read_results(folder.results).head.sha256
    except UserError:  # a damaged file counts as no results
        return False
    was, now = load_recipe(folder.recipe).eval.final(), settings.final()
    was, now = (each.model_copy(update={"prompts": absolute_prompts(each.prompts)}) for each in (was, now))
    return bool(measured == weights_hash(folder.head)) and was == now
