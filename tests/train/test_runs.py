"""Whole runs as processes of their own, as users start them: killed, interrupted, doubled."""

import shutil
from pathlib import Path

import pytest

from tests.processes import finish, launcher, start, wait_for
from tests.runs import Settings, WriteRecipe

pytestmark = pytest.mark.slow


@pytest.fixture
def small(settings: Settings) -> Settings:
    settings["head"] = {"kind": "eagle3", "depth": 2, "intermediate_size": 32}
    settings["train"] |= {"max_steps": 12, "eval_every": 4, "checkpoint_every": 2, "log_every": 1}
    settings["eval"]["report"] = {"repeats": 1}
    return settings


def test_a_killed_launcher_leaves_no_orphan(small: Settings, write_recipe: WriteRecipe) -> None:
    small["train"] |= {"max_steps": 10_000, "eval_every": 10_000, "checkpoint_every": 10_000}
    run = Path(small["output_dir"])
    process = start(write_recipe(small), launcher=launcher("--cpu"))
    wait_for(run, 2, process)
    process.terminate()
    process.communicate(timeout=60)  # until the last process that holds the pipe is gone
    assert len(list(run.glob("checkpoints/step-*/manifest.json"))) == 1


# Each process has a folder of its own, as on two machines; `data.jsonl` is wherever the recipe's sources are.
TWO_MACHINES = """
import os
from train import step
from train.entry import run_entry
from heads.core.errors import UserError

rank, make_batch = os.environ["RANK"], step.make_batch
os.environ["LOCAL_RANK"] = "0"
os.chdir(f"machine-{rank}")

def make(*arguments):
    if os.path.exists("broken"):
        raise UserError(f"no more batches on machine {rank}")
    return make_batch(*arguments)

step.make_batch = make
run_entry("eagle")
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("lacks", "fault"), [("data", "data.jsonl: no such file"), ("batches", "no more batches on machine")]
)
def test_the_process_that_fails_says_why_once(
    lacks: str, fault: str, rank: int, small: Settings, write_recipe: WriteRecipe, tmp_path: Path
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
    assert fault in said.rpartition("Failures:")[2] or fault in said.rpartition("Root Cause")[2], (
        "the launcher's report"
    )
    assert "onnection closed" not in said and "train/entry.py" not in said, said
