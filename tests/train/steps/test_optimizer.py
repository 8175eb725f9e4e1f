"""Learning rates by step, and which parameters decay."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from heads.blocks.dflash2 import BlockConvolution
from heads.blocks.lilicorr_lattice import LatticeAttention
from tests.support.closeness import assert_close
from tests.support.published_heads import V, dflash2, domino, dspark, eagle3, lilicorr, xpress
from tests.support.small_targets import VOCAB, make_drafter, make_target
from train.recipe.recipe import Train
from train.steps.learning_rate import learning_rate
from train.steps.optimizer import Muon, make_optimizer, orthogonal


def test_cosine_warms_up_and_falls_to_its_floor() -> None:
    settings = Train(max_steps=110, lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(step, settings) for step in range(110)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1.0 and max(rates) == 1.0
    assert rates[60] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_wsd_is_flat_until_its_fall() -> None:
    settings = Train(max_steps=100, lr=1.0, warmup_steps=5, schedule="wsd", decay_fraction=0.2, min_lr_ratio=0.0)
    rates = [learning_rate(step, settings) for step in range(101)]
    assert set(rates[5:81]) == {1.0} and rates[90] == pytest.approx(0.5) and rates[100] == 0.0


def test_norms_and_biases_do_not_decay() -> None:
    def by_decay(module: nn.Module) -> dict[float, list[tuple[int, ...]]]:
        groups = make_optimizer(module, Train(max_steps=1, weight_decay=0.1)).param_groups
        return {group["weight_decay"]: [tuple(p.shape) for p in group["params"]] for group in groups}

    head = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    assert by_decay(head) == {0.1: [(3, 2)], 0.0: [(3,), (3,), (3,)]}
    assert by_decay(BlockConvolution(8, 2, 4)) == {0.1: [(8, 8)], 0.0: [(2, 2, 8)]}  # the base, which is 1


def draft_of(family: str) -> Any:
    return make_drafter("draft", make_target(family, torch.float32), layers=[0, 2])


@pytest.mark.parametrize(
    "make",
    [eagle3, dflash2, domino, dspark, lilicorr, xpress, partial(draft_of, "t5"), partial(draft_of, "opt")],
    ids=["eagle3", "dflash2", "domino", "dspark", "lilicorr", "xpress", "t5", "opt"],
)
def test_muon_is_for_every_matrix_but_tables_of_tokens_or_positions(make: Callable[[], Any]) -> None:
    head = make()
    groups = make_optimizer(head, Train(max_steps=1, optimizer="muon")).param_groups
    updated = {id(p) for group in groups if "momentum" in group for p in group["params"]}
    matrices = {name: p for name, p in head.named_parameters() if p.dim() == 2 and p.requires_grad}
    named = {name for name in matrices if re.search("slot_bias|attention_bias|embed_positions|lm_head", name)}
    sized = {name for name, p in matrices.items() if {V, VOCAB} & {*p.shape}}
    assert {name for name, p in matrices.items() if id(p) not in updated} == named | sized


@pytest.mark.parametrize(
    ("stack", "name"),
    [(nn.GRU(6, 4, bias=False), "weight_ih_l0"), (LatticeAttention(8, 2), "in_proj_weight")],
    ids=["a GRU's gates", "queries, keys and values"],
)
def test_matrices_of_one_parameter_are_orthogonalised_one_by_one(stack: nn.Module, name: str) -> None:
    parameter = stack.get_parameter(name)
    alone = nn.ParameterList([part.detach().clone() for part in parameter.chunk(3)])
    gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    for module in (stack, alone):
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
    parameter.grad = gradient
    for p, part in zip(alone, gradient.chunk(3), strict=True):
        p.grad = part
    for module in (stack, alone):
        make_optimizer(module, Train(max_steps=1, optimizer="muon", lr=0.1)).step()
    assert_close(parameter, torch.cat([*alone]))


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_muon_is_torchs_where_both_are_in_bfloat16(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(weight) for weight in torch.randn(1, *shape).repeat(2, 1, 1))
    library = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    group = {"params": [ours], "lr": 0.1, "weight_decay": 0.1, "momentum": 0.95, "matrices": 1}
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
