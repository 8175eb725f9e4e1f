"""Faults of processes that a launcher started: a clear line, and a run that the same command goes on with."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.processes import finish, form_launcher, launcher, start, wait_for
from tests.support.runs import Settings, same, write_recipe
from tests.support.training_steps import stored

pytestmark = pytest.mark.slow


@pytest.fixture
def small(small: Settings) -> Settings:
    small["train"] |= {"max_steps": 40, "batch_size": 1, "checkpoint_every": 2}
    return small


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


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_a_killed_process_loses_nothing(form: str, small: Settings, tmp_path: Path) -> None:
    """One of two processes is killed at three moments, and the run begun again each time."""
    recipe, unbroken, broken = write_recipe(small), tmp_path / "unbroken", tmp_path / "broken"
    finish(start(recipe, f"output_dir={unbroken}", launcher=form_launcher(form)))
    rng = random.Random(0)
    for n in range(3):
        before = last_step(broken)
        launched = start(recipe, f"output_dir={broken}", launcher=form_launcher(form))
        while last_step(broken) <= before and launched.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        assert launched.poll() is None, "killed before the end of training"
        os.kill(trainers(launched)[n % 2], signal.SIGKILL)
        said, _ = launched.communicate(timeout=120)
        ours = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(ours) <= 1 and all("another process of this launch has ended" in line for line in ours), said
    finish(start(recipe, f"output_dir={broken}", launcher=form_launcher(form)))
    assert same(*(stored(run / "checkpoints/step-40") for run in (unbroken, broken)))


def test_a_signal_to_one_process_stops_all_with_a_checkpoint(small: Settings) -> None:
    small["train"] |= {"max_steps": 10_000, "checkpoint_every": 10_000}
    run = Path(small["output_dir"])
    launched = start(write_recipe(small), launcher=form_launcher("fsdp"))
    wait_for(run, 2, launched)
    os.kill(trainers(launched)[1], signal.SIGTERM)
    said = finish(launched, 1)  # the launcher's own status
    # Once in our words; torchrun's report quotes it.
    assert sum(line.startswith("interrupted at step ") for line in said.splitlines()) == 1, said
    assert len(list(run.glob("checkpoints/step-*"))) == 1


def test_a_killed_launcher_leaves_no_orphan(small: Settings) -> None:
    small["train"] |= {"max_steps": 10_000, "eval_points": 1, "checkpoint_every": 10_000}
    run = Path(small["output_dir"])
    process = start(write_recipe(small), launcher=launcher("--cpu"))
    wait_for(run, 2, process)
    process.terminate()
    process.communicate(timeout=60)  # until the last process that holds the pipe is gone
    assert len(list(run.glob("checkpoints/step-*/manifest.json"))) == 1


# Each process has a folder of its own, as on two machines; `data.jsonl` is wherever the recipe's sources are.
TWO_MACHINES = """
import os
from train.steps import stepper
from train.entry import run_entry
from heads.core.errors import UserError

rank, make_batch = os.environ["RANK"], stepper.make_batch
os.environ["LOCAL_RANK"] = "0"
os.chdir(f"machine-{rank}")

def make(*arguments):
    if os.path.exists("broken"):
        raise UserError(f"no more batches on machine {rank}")
    return make_batch(*arguments)

stepper.make_batch = make
run_entry("eagle")
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("lacks", "fault"), [("data", "data.jsonl: no such file"), ("batches", "no more batches on machine")]
)
def test_the_process_that_fails_says_why_once(
    lacks: str, fault: str, rank: int, small: Settings, tmp_path: Path
) -> None:
    """The launcher stops the others, whose connections break: none of that is printed."""
    for machine in range(2):
        (tmp_path / f"machine-{machine}").mkdir()
        if lacks == "batches" or machine != rank:
            shutil.copy(tmp_path / "data.jsonl", tmp_path / f"machine-{machine}")
    if lacks == "batches":
        (tmp_path / f"machine-{rank}/broken").touch()
    small["data"]["sources"][0]["path"] = "data.jsonl"
    (tmp_path / "entry.py").write_text(TWO_MACHINES)
    flags = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    process = start(write_recipe(small), launcher=launcher(*flags), script=tmp_path / "entry.py", folder=tmp_path)
    said = finish(process, 1)  # the launcher's own status
    ours = [line for line in said.splitlines() if line.startswith(("error: ", "interrupted"))]
    assert len(ours) == 1 and fault in ours[0], said
    report = said.rpartition("Failures:")[2], said.rpartition("Root Cause")[2]
    assert any(fault in part for part in report), "the launcher's report"
    assert "onnection closed" not in said and "train/entry.py" not in said, said


@pytest.mark.parametrize("form", ["ddp", "fsdp", "zero2", "zero3"])
def test_two_machines_with_disks_of_their_own_stop_and_go_on(form: str, small: Settings, tmp_path: Path) -> None:
    small["train"] |= {"max_steps": 16, "checkpoint_every": 100}
    recipe = write_recipe(small)
    machines = [tmp_path / f"machine-{rank}" for rank in range(2)]
    for folder in machines:
        folder.mkdir()
        shutil.copy(tmp_path / "data.jsonl", folder)

    def launch() -> list[subprocess.Popen[str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        flags = ["--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1"]
        flags += ["--main_process_port", str(port), "--machine_rank"]
        changes = "output_dir=run", "data.sources.0.path=data.jsonl"
        return [
            start(recipe, *changes, launcher=[*form_launcher(form), *flags, str(rank)], folder=folder)
            for rank, folder in enumerate(machines)
        ]

    first = launch()
    wait_for(machines[0] / "run", 2, first[0])
    for launched in first:
        launched.terminate()
    for launched in first:
        launched.communicate(timeout=120)
    stopped = last_step(machines[0] / "run")
    said = [finish(launched) for launched in launch()]
    assert f"2 processes on 2 machines, {'deepspeed' if 'zero' in form else form}" in said[0]
    assert "resumed from" in said[0] and 2 <= stopped < last_step(machines[0] / "run") == 16
    assert (machines[0] / "run/results.json").is_file() and not (machines[1] / "run").exists()
