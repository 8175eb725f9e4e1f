"""Measure a head in many settings: run a wandb sweep file for eval/bench.py, with or without a wandb server.

    python eval/sweep.py recipes/sweeps/quickstart-drafts.yaml
    python eval/sweep.py FILE --wandb offline    # also record each setting as a wandb run, for `wandb sync` later
    python eval/sweep.py FILE --wandb online     # the server chooses, as with `wandb sweep FILE` and `wandb agent`

Every setting runs in its own process, so that a failure does not affect the other settings. The table, sweep.json and
sweep.csv are sorted by the file's metric. An interrupted sweep continues with the same command, because settings that
were already measured are not measured again.

Exit status: 0; 1 if an output was not the target's own or a measurement failed; 2 for an error that the user can fix.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.bench import parse_arguments as parse_bench
from eval.command import Parser, count, exit_status, seed


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        "Measure a head in many settings: run a wandb sweep file for eval/bench.py, with or without a wandb server."
    )
    add = parser.add_argument
    add("sweep", type=Path, help="a sweep file, such as recipes/sweeps/quickstart-drafts.yaml")
    add("--out", type=Path, help="folder for the results; default: runs/sweep-NAME")
    add("--count", type=count, help="most settings to measure; default: run_cap of the file")
    add("--seed", type=seed, default=0, help="seed with which method random draws settings")
    add(
        "--wandb",
        choices=["off", "offline", "online"],
        default="off",
        help="online: a wandb server chooses the settings",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.commands.sweep_run import run_sweep

    return run_sweep(options, parse_bench)


if __name__ == "__main__":
    sys.exit(exit_status(main))
