"""Launches that are not what they say are refused."""

import pytest
import torch

from heads.core.errors import UserError
from train.recipe.recipe import Train
from train.steps.accelerate_launch import make_accelerator
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


def test_the_recipe_decides_precision_and_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    accelerator = make_accelerator(Train(max_steps=1, grad_accum=3, precision="bf16"))
    assert accelerator.gradient_accumulation_steps == 3 and accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize("begun", ["bf16", "no", None])
def test_auto_is_what_the_run_began_with_or_what_the_processor_is_fast_in(begun: str | None) -> None:
    fast = fastest_dtype(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    wanted = begun or ("bf16" if fast == torch.bfloat16 else "no")
    assert make_accelerator(SETTINGS, begun).mixed_precision == wanted
