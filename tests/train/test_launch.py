"""Launches that are not what they say are refused."""

import pytest

from heads.errors import UserError
from train.launch import make_accelerator
from train.recipe import Train

SETTINGS = Train(max_steps=1)


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "launched with --mixed_precision fp16, the recipe says .* fp32"),
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
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=fault):
        make_accelerator(SETTINGS)


def test_the_recipe_decides_precision_and_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    accelerator = make_accelerator(Train(max_steps=1, grad_accum=3, precision="bf16"))
    assert accelerator.gradient_accumulation_steps == 3 and accelerator.mixed_precision == "bf16"
