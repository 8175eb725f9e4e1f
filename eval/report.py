"""Render measurements again: a table in the terminal, charts, a self-contained page, and a model card; or several
measurements in one page, as a table of models, methods and suites.

    python eval/report.py RUN_OR_RESULTS
    python eval/report.py RUN_OR_RESULTS RUN_OR_RESULTS ... --out FOLDER

RUN_OR_RESULTS is a results.json, a compare.json, a run, whose own results.json is taken, or a folder of measurements,
whose newest one is. Name a later measurement of a run by its folder, RUN/bench/NAME.
One of them: writes report.html, plots/ and README.md (the model card), or for a compare.json its page, into its own
folder, and replaces those there. Several: writes report.html into --out. A run without results, which trains or was
interrupted: writes its report.html with the curves so far. No model is loaded.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, exit_status
from eval.records.result_folders import RESULTS, folders_of, newest_results
from eval.records.results import COMPARED, read_log, read_results
from eval.records.schema import Results
from heads.core.errors import UserError
from heads.core.files import check_folder, file_hash, write_text
from heads.targets.hub import is_here

SEVERAL = Path("runs/report")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Render the page, charts and model card of a measurement again, or one page of several.")
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        help="a results.json or compare.json, a run's folder (its own results.json), or a folder of measurements (the "
        "newest one)",
    )
    parser.add_argument("--out", type=Path, help=f"folder of the page of several results; default: {SEVERAL}")
    options = parser.parse_args(arguments)
    if options.out and len(options.results) == 1:
        parser.error("--out: is of several results; one is rendered where it is")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from rich.console import Console

    from eval.pages.card import check_card
    from eval.pages.html import render_several
    from eval.pages.run_report import print_report, write_progress, write_report
    from eval.records.learning_curve import held_out_lines

    if len(options.results) == 1 and is_unmeasured(options.results[0]):
        write_progress(options.results[0], Console())
        print(f"written to {options.results[0] / 'report.html'}", file=sys.stderr)
        return 0
    measurements = [find_results(path) for path in options.results]
    if len(measurements) > 1:
        check_folder(options.out or SEVERAL, "--out")
        page = (options.out or SEVERAL) / "report.html"
        write_text(page, render_several([results for _, results in measurements]))
        print(f"written to {page}", file=sys.stderr)
        return 0
    ((folder, results),) = measurements
    if not results.is_comparison:
        check_card(folder, "the folder")
        follow_head(results, options.results[0])
    write_report(results, folder)
    print_report(results, Console())
    for line in held_out_lines(results.head.curve):
        print(line)
    print(f"written to {folder}", file=sys.stderr)
    return 0


def follow_head(results: Results, path: Path) -> None:
    """Let results name the head of the run at `path` and its target where they are, if the results are of that head:
    the run may have moved since, or the working folder was another."""
    for file in [*path.glob("*.safetensors"), *path.glob("head/*.safetensors")]:
        if file_hash(file) == results.head.sha256:
            results.head.path = str(file.parent)
            config = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))
            target = config["draftsmith"]["target"]["name"]
            if target is not None and not is_here(results.target.name):
                results.target.name = target
            return


def is_unmeasured(run: Path) -> bool:
    """Return True for a run that has begun to train and has no final measurement yet."""
    log = run / "metrics.jsonl"
    return (
        os.path.isfile(log)
        and bool(read_log(log))
        and not any((folder / RESULTS).is_file() for folder in folders_of(run))
    )


def find_results(path: Path) -> tuple[Path, Results]:
    """Return the results that a path names, and their folder. UserError if there are none."""
    for folders in ([path], [*folders_of(path), *sorted(path.glob("*"))]) if os.path.isdir(path) else ():
        if newest := newest_results(folders) or newest_results(folders, served=True):
            return newest
    if os.path.isfile(path / COMPARED):
        return path, read_results(path / COMPARED)
    if os.path.isdir(path):
        raise UserError(f"{path}: no results.json in it; measure with eval/bench.py")
    return path.parent, read_results(path)


if __name__ == "__main__":
    sys.exit(exit_status(main))
