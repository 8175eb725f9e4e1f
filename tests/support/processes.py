"""Runs in their own processes, as users start them."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(
    recipe: Path,
    *overrides: str,
    launcher: list[str] | None = None,
    script: Path = ROOT / "train/eagle.py",
    folder: Path = ROOT,
) -> subprocess.Popen[str]:
    """Start one run of an entry in its own session, so that a signal can reach the process that trains."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "WANDB_"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*(launcher or [sys.executable]), str(script), str(recipe), *overrides]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def launcher(*flags: str) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", *flags]


def form_launcher(form: str, *flags: str) -> list[str]:
    """Return the launch of one of the configurations that come with the project."""
    return launcher(*flags, "--config_file", str(ROOT / f"recipes/accelerate/{form}.yaml"))


def wait_for(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until metrics.jsonl of the run has a line of `step`."""
    while process.poll() is None:
        metrics = run / "metrics.jsonl"
        if metrics.is_file() and f'"step": {step}' in metrics.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate()[0])
