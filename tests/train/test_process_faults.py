"""Faults of one process of several: a clear line, and a run that the same command goes on with."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, finish, launcher, start, wait_for
from tests.runs import Settings, WriteRecipe
from tests.train.steps import stored

pytestmark = pytest.mark.slow


@pytest.fixture
def small(settings: Settings) -> Settings:
    settings["head"] = {"kind": "eagle3", "depth": 2, "intermediate_size": 32}
    settings["train"] |= {"max_steps": 40, "batch_size": 1, "checkpoint_every": 2, "log_every": 1}
    settings["eval"]["report"] = {"repeats": 1}
    return settings


def form_launcher(form: str) -> list[str]:
    """Two processes of a form."""
    return launcher("--config_file", str(ROOT / f"recipes/accelerate/{form}.yaml"))


def trainers(launched: subprocess.Popen[str]) -> list[int]:
    """The processes that a launch has started, in the order of their ranks."""
    children = Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split()
    ranks = {}
    for child in children:
        for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                ranks[int(entry.removeprefix(b"RANK="))] = int(child)
    return [ranks[rank] for rank in sorted(ranks)]


def last_step(run: Path) -> int:
    """The last step in a run's record; 0 before there is one."""
    metrics = run / "metrics.jsonl"
    text = metrics.read_text() if metrics.is_file() else ""
    steps = [json.loads(line)["step"] for line in text.splitlines() if line.endswith("}")]
    return max(steps, default=0)


def moments(kills: int, seed: int = 0) -> Iterator[tuple[int, float, int]]:
    """(steps to wait for, seconds after them, the rank to kill)."""
    rng = random.Random(seed)
    return ((1, rng.uniform(0, 0.5), n % 2) for n in range(kills))


def kill_and_resume(form: str, recipe: Path, folder: Path, kills: int) -> int:
    """Kill one process of a run at each of so many moments, start it again each time, and compare the outcome with a
    run that was left alone. Returns how many of the kills struck before the end of training."""
    unbroken, broken = folder / "unbroken", folder / "broken"
    finish(start(recipe, f"output_dir={unbroken}", launcher=form_launcher(form)))
    struck = 0
    for steps, seconds, rank in moments(kills):
        before = last_step(broken)
        launched = start(recipe, f"output_dir={broken}", launcher=form_launcher(form))
        while last_step(broken) < before + steps and launched.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds)
        if launched.poll() is None:
            os.kill(trainers(launched)[rank], signal.SIGKILL)
            struck += 1
        said, _ = launched.communicate(timeout=120)
        ours = [line for line in said.splitlines() if line.startswith("error: ")]
        assert launched.returncode == 0 or len(ours) <= 1, said
        assert all("another process of this launch has ended" in line for line in ours), said
        print(f"{form}: rank {rank} killed, status {launched.returncode}, step {last_step(broken)}: {ours}", flush=True)
    finish(start(recipe, f"output_dir={broken}", launcher=form_launcher(form)))
    last = max((unbroken / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:])).name
    whole, mended = (stored(run / "checkpoints" / last) for run in (unbroken, broken))
    assert whole.keys() == mended.keys() and all(torch.equal(tensor, mended[name]) for name, tensor in whole.items())
    return struck


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_a_killed_process_loses_nothing(form: str, small: Settings, write_recipe: WriteRecipe, tmp_path: Path) -> None:
    assert kill_and_resume(form, write_recipe(small), tmp_path, 3) == 3


def test_a_signal_to_one_process_stops_all_with_a_checkpoint(
    small: Settings, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    small["train"] |= {"max_steps": 10_000, "checkpoint_every": 10_000}
    run = Path(small["output_dir"])
    launched = start(write_recipe(small), launcher=form_launcher("fsdp"))
    wait_for(run, 2, launched)
    os.kill(trainers(launched)[1], signal.SIGTERM)
    said = finish(launched, 1)  # the launcher's own status
    # Once in our words; torchrun's report quotes it.
    assert sum(line.startswith("interrupted at step ") for line in said.splitlines()) == 1, said
    (checkpoint,) = run.glob("checkpoints/step-*")
    assert len(list(checkpoint.glob("shard-*.safetensors"))) == 2


# A process of two that may write no more than some bytes into a file of a checkpoint's second half.
FULL_DISK = """
import os, resource, signal
from train import checkpointing
from train.entry import run_entry

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save = checkpointing.state_dict_saver.save

def save_part(tensors, *, storage_writer):
    full = os.environ["RANK"] == "1" and "step-4" in str(storage_writer.path)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    try:
        return save(tensors, storage_writer=storage_writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

checkpointing.state_dict_saver.save = save_part
run_entry("eagle")
"""


def test_a_full_disk_of_one_process_loses_nothing(small: Settings, write_recipe: WriteRecipe, tmp_path: Path) -> None:
    small["train"]["max_steps"] = 6
    recipe, entry, run = write_recipe(small), tmp_path / "entry.py", Path(small["output_dir"])
    entry.write_text(FULL_DISK)
    said = finish(start(recipe, launcher=form_launcher("fsdp"), script=entry), 1)
    ours = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1 and "no space left" in ours[0] and "step-2 is intact" in ours[0], said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-2"]
    assert "resumed from" in finish(start(recipe, launcher=form_launcher("fsdp")))
