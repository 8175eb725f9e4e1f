"""Launches that are not what they say are refused."""

import pytest
import torch
from accelerate.utils import DistributedType

from heads.errors import UserError
from tests.heads.published_heads import dflash
from train.fast_dtype import fastest_dtype
from train.launch import make_accelerator
from train.recipe import Train
from train.step import check_mode

SETTINGS = Train(max_steps=1)


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "launched with --mixed_precision fp16, the recipe says .* auto"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}, "launched with --gradient_accumulation_steps 3, .* 1"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "--fsdp_version 2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "FSDP needs a GPU"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "--fsdp_cpu_ram_efficient_loading false",
        ),
    ],
)
def test_wrong_launches(environment: dict[str, str], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCELERATE_USE_CPU": "true", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=fault):
        make_accelerator(SETTINGS)


def test_deepspeed_does_not_hand_out_the_gradients_that_d_pace_divides() -> None:
    check_mode(dflash(), DistributedType.DEEPSPEED)
    check_mode(dflash(weights="d_pace"), DistributedType.MULTI_GPU)
    with pytest.raises(UserError, match=r"head\.weights: d_pace .* use exponential"):
        check_mode(dflash(weights="d_pace"), DistributedType.DEEPSPEED)


def test_the_recipe_decides_precision_and_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    accelerator = make_accelerator(Train(max_steps=1, grad_accum=3, precision="bf16"))
    assert accelerator.gradient_accumulation_steps == 3 and accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize("begun", ["bf16", "no"])
def test_a_resumed_run_keeps_the_precision_that_auto_came_to(begun: str) -> None:
    assert make_accelerator(Train(max_steps=1), begun).mixed_precision == begun


def test_auto_is_what_the_processor_is_fast_in() -> None:
    fast = fastest_dtype(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert make_accelerator(Train(max_steps=1)).mixed_precision == ("bf16" if fast == torch.bfloat16 else "no")
