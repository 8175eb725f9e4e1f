"""Launches that are not what they say are refused."""

from types import SimpleNamespace

import pytest
import torch

from heads.core.errors import UserError
from tests.support.processes import ROOT
from train.recipe.recipe import Train
from train.steps.accelerate_launch import check_started, make_accelerator
from train.steps.fast_dtype import fastest_dtype

SETTINGS = Train(max_steps=1)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
WRONG: list[tuple[dict[str, str], str]] = [
    ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "--mixed_precision fp16: the recipe says .* auto"),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}, "--gradient_accumulation_steps 3"),
    (FSDP | {"FSDP_VERSION": "1"}, "--fsdp_version 1: expected 2"),
    (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, "--fsdp_offload_params true"),
]


@pytest.mark.parametrize(("environment", "fault"), WRONG)
def test_wrong_launches(environment: dict[str, str], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCELERATE_USE_CPU": "true", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=fault):
        make_accelerator(SETTINGS)


MACHINES = ["--num_machines", "2", "--machine_rank", "1"]
APART = [
    (["accelerate", "launch", "--cpu", "--config_file", "recipes/accelerate/ddp.yaml", *MACHINES], "leave out --cpu"),
    (["python", "-m", "accelerate.commands.launch", "--num_processes", "4"], "give --multi_gpu"),
    (
        ["accelerate-launch", "--use_deepspeed", "--num_processes", "2", *MACHINES],
        "deepspeed_multinode_launcher standard",
    ),
]


@pytest.mark.parametrize(("words", "remedy"), APART)
def test_processes_that_a_launcher_left_alone(words: list[str], remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is the parent of the process, or a parent of that, and its file and its options say what it was to
    start."""
    between = SimpleNamespace(cmdline=lambda: ["deepspeed", "train/eagle.py"], cwd=lambda: "/")
    launcher = SimpleNamespace(cmdline=lambda: [*words, "train/eagle.py", "--plan"], cwd=lambda: str(ROOT))
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(parents=lambda: [between, launcher]))
    check_started()  # not started by a launcher
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(UserError, match=f"asked for .* and has started 1 .*{remedy}"):
        check_started()
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_started()


def test_the_recipe_decides_precision() -> None:
    assert make_accelerator(Train(max_steps=1, precision="bf16")).mixed_precision == "bf16"


@pytest.mark.parametrize("begun", ["bf16", "no", None])
def test_auto_is_what_the_run_began_with_or_what_the_processor_is_fast_in(begun: str | None) -> None:
    fast = fastest_dtype(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    wanted = begun or ("bf16" if fast == torch.bfloat16 else "no")
    assert make_accelerator(SETTINGS, begun).mixed_precision == wanted
