"""Run a measurement as a wandb run, or a sweep of measurements with a wandb server.

    python scripts/tracked.py eval/bench.py --head=runs/quickstart --tree=chain:5    # what a sweep file's command runs
    python scripts/tracked.py --agent recipes/sweeps/quickstart-drafts.yaml          # wandb sweep, then wandb agent

The first command runs the program with its arguments and logs the figures and charts of its report (in --out, else in
runs/wandb/ID) to wandb. With WANDB_MODE=disabled it only runs the program. The exit status is the program's.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from eval.benchmark.results import read_results
from eval.benchmark.sweep_file import read_sweep
from eval.command import Parser, count, exit_status
from heads.errors import UserError, first_line
from heads.files import read_given

NAMING = ("head", "tree", "temperature", "batch_size")
"""Options that name a run, unless WANDB_NAME does."""


def run_tracked(words: list[str]) -> int:
    """Run a program that writes results.json into --out, as a wandb run. Return the program's exit status."""
    if os.environ.get("WANDB_MODE") == "disabled":
        return subprocess.run([sys.executable, *words]).returncode
    given = next((Path(word.removeprefix("--out=")) for word in words if word.startswith("--out=")), None)
    from train.tracker import log_outcome, run_place  # imports torch

    run = start(words, given or Path())
    out = given or Path("runs/wandb") / run.id
    status = 1
    if not run.offline:
        print(run_place(run), file=sys.stderr, flush=True)
    try:
        status = subprocess.run([sys.executable, *words, *([] if given else [f"--out={out}"])]).returncode
        if (out / "results.json").is_file():
            log_outcome(run, read_results(out / "results.json"), out)
    finally:
        run.finish(exit_code=status)
        if run.offline:
            print(run_place(run), file=sys.stderr)
    return status


def start(words: list[str], folder: Path) -> Any:
    """Return a new wandb run with the options as its config, or the agent's run if an agent started this process."""
    import wandb

    from train.tracker import quiet_settings

    options = [word[2:].partition("=") for word in words if word.startswith("--") and not word.startswith("--out=")]
    config = {name.replace("-", "_"): plain_value(text) if equals else True for name, equals, text in options}
    in_sweep = "WANDB_SWEEP_ID" in os.environ
    named = [f"{name}={config[name]}" for name in NAMING if name in config]
    try:
        return wandb.init(
            project=None if in_sweep else os.environ.get("WANDB_PROJECT", "draftsmith"),
            name=os.environ.get("WANDB_NAME") or " ".join(named) or None,
            config=None if in_sweep else config,
            dir=str(folder),
            settings=quiet_settings(),
        )
    except wandb.errors.Error as error:
        raise UserError(f"wandb does not start ({first_line(error)}); log in, or set WANDB_MODE=offline") from None


def plain_value(text: str) -> float | str:
    """Return the number that a text is, or the text. Of numbers, wandb draws axes."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def run_agent(file: Path, runs: int | None) -> int:
    """Create a sweep from a file on the server, and run its measurements here."""
    import wandb

    read_sweep(file)
    config = yaml.safe_load(read_given(file, "a sweep file"))
    try:
        sweep_id = wandb.sweep(config, project=config.get("project", "draftsmith"), entity=config.get("entity"))
        wandb.agent(sweep_id, count=runs)
    except (wandb.errors.Error, OSError) as error:
        raise UserError(f"wandb: no sweep ({first_line(error)}); log in, or sweep with --wandb offline") from None
    return 0


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Return the parsed command line that starts a sweep."""
    parser = Parser("Start a wandb sweep of a file and work it off.")
    parser.add_argument("--agent", type=Path, required=True, help="a sweep file")
    parser.add_argument("--count", type=count, help="runs at most")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Run a program with its arguments, or a sweep with --agent FILE."""
    if words and not words[0].startswith("-"):
        return run_tracked(words)
    options = parse_arguments(words)
    return run_agent(options.agent, options.count)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
