"""Render a results.json again: a table in the terminal, charts, a self-contained page, and a model card.

    python eval/report.py RUN_OR_RESULTS_JSON

Writes report.html, plots/ and README.md (the model card) into the folder of the results.json and replaces those there.
For a run that was measured several times, the newest results are rendered. No model is loaded.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.command import Parser, exit_status


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Render report.html, plots/ and README.md from a results.json again.")
    parser.add_argument(
        "results",
        type=Path,
        help="a results.json, or a run directory or folder of measurements, whose newest results are rendered",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.reporting.report import report_command

    return report_command(options.results)


if __name__ == "__main__":
    sys.exit(exit_status(main))
