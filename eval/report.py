"""Render a results.json again: a table in the terminal, charts, a self-contained page, and a model card.

    python eval/report.py RUN_OR_RESULTS_JSON

Writes report.html, plots/ and README.md (the model card) into the folder of the results.json and replaces those there.
For a run that was measured several times, the newest results are rendered. No model is loaded.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.measure.command import Parser, exit_status
from heads.core.errors import UserError


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Render report.html, plots/ and README.md from a results.json again.")
    parser.add_argument(
        "results",
        type=Path,
        help="a results.json, or a run directory or folder of measurements, whose newest results are rendered",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    path = parse_arguments(arguments).results
    from rich.console import Console

    from eval.measure.folders import folders_of, newest_results
    from eval.measure.results import read_results
    from eval.pages.card import check_card
    from eval.pages.report import print_report, write_report

    compared = path if path.name == "compare.json" else path / "compare.json"
    folders = [*folders_of(path), *sorted(path.glob("*"))] if os.path.isdir(path) else []
    if newest := newest_results(folders) or newest_results(folders, served=True):
        folder, results = newest
    elif os.path.isfile(compared):
        raise UserError(f"{compared}: a comparison of several heads, which is rendered anew only by comparing again")
    elif os.path.isdir(path):
        raise UserError(f"{path}: no results.json in it; measure with eval/bench.py")
    else:
        folder, results = path.parent, read_results(path)
    check_card(folder, "the folder")
    write_report(results, folder)
    print_report(results, Console())
    print(f"written to {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
