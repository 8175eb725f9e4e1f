"""Learning rates by step, and which parameters decay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from heads.blocks.dflash2 import BlockConvolution
from tests.support.closeness import assert_close
from tests.support.published_heads import V, dflash2, domino, dspark, lilicorr, xpress
from train.recipe.recipe import Train
from train.steps.optimizer import Muon, lr_factor, make_optimizer, orthogonal


def test_cosine_warms_up_and_falls_to_its_floor() -> None:
    settings = Train(max_steps=110, warmup_steps=10, min_lr_ratio=0.1)
    rates = [lr_factor(step, settings) for step in range(110)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0 and max(rates) == 1.0
    assert rates[60] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_wsd_is_flat_until_its_fall() -> None:
    settings = Train(max_steps=100, warmup_steps=5, schedule="wsd", decay_fraction=0.2, min_lr_ratio=0.0)
    rates = [lr_factor(step, settings) for step in range(101)]
    assert set(rates[5:81]) == {1.0} and rates[90] == pytest.approx(0.5) and rates[100] == 0.0


def test_norms_and_biases_do_not_decay() -> None:
    head = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(head, Train(max_steps=1, weight_decay=0.1))
    by_decay = {group["weight_decay"]: [tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups}
    assert by_decay == {0.1: [(3, 2)], 0.0: [(3,), (3,), (3,)]}
    convolution = make_optimizer(BlockConvolution(8, 2, 4), Train(max_steps=1, weight_decay=0.1))
    by_decay = {group["weight_decay"]: [tuple(p.shape) for p in group["params"]] for group in convolution.param_groups}
    assert by_decay == {0.1: [(8, 8)], 0.0: [(2, 2, 8)]}  # the base, which is 1


@pytest.mark.parametrize("make", [dflash2, domino, dspark, lilicorr, xpress])
def test_muon_is_for_no_table_of_tokens_or_positions(make: Callable[[], Any]) -> None:
    head = make()
    updated = make_optimizer(head, Train(max_steps=1, optimizer="muon")).param_groups[0]
    names = {name for name, p in head.named_parameters() if any(p is inner for inner in updated["params"])}
    assert "fc.weight" in names and "momentum" in updated
    assert not [name for name in names if "bias" in name or V in head.get_parameter(name).shape]


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_muon_is_torchs_where_both_are_in_bfloat16(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(weight) for weight in torch.randn(1, *shape).repeat(2, 1, 1))
    library = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    group = {"params": [ours], "lr": 0.1, "weight_decay": 0.1, "momentum": 0.95}
    pair = Muon([group], products=torch.bfloat16), library
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in pair:
            optimizer.step()
    assert_close(ours, theirs)


def test_updates_in_float32_are_orthogonal_too() -> None:
    matrix = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    wide, narrow = orthogonal(matrix, torch.float32), orthogonal(matrix, torch.bfloat16).float()
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert all(0.6 < value < 1.3 for value in torch.linalg.svdvals(wide))
    assert float((left.T @ wide @ right.T).diagonal().min()) > 0.6, "the singular vectors are the matrix's own"
    assert float((wide - narrow).norm() / wide.norm()) < 0.1
