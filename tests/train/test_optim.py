"""Learning rates by step, and which parameters decay."""

import pytest
from torch import nn

from train.optim import lr_factor, make_optimizer
from train.recipe import Train


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
