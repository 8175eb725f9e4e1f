"""Estimates of small trees from one wide tree, and measurements of a calibration."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eval.benchmark.prompts import Prompt
from eval.benchmark.settings import BenchSettings
from eval.benchmark.tune import NEVER, Calibration, Outcome, calibrate, can_draft, ranks
from heads.backends.slot_mapping import ancestors
from heads.backends.torch.accept import match
from heads.backends.torch.sampling import RowSampling
from heads.errors import UserError
from heads.growth import grow
from heads.target.frozen import FrozenTarget
from heads.tree import Proposal, TreeShape, parse_shape

VOCAB, ROWS = 12, 16


def grown(text: str, table: Tensor) -> Proposal:
    """The tree that a draft of word pairs grows below tokens 0 .. 15."""
    root = torch.arange(ROWS) % VOCAB

    def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
        return table[tokens]

    pick = RowSampling(ROWS).pick
    return grow(parse_shape(text), root, torch.zeros_like(root), table[root][:, None], pick, expand, None)


def accepted(proposal: Proposal, truth: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the depth accepted by a target whose token after x is truth[x], and the path."""
    acceptance = match(proposal, truth[proposal.tokens], ancestors(proposal.parents, depth), depth)
    return acceptance.accepted, acceptance.path


@pytest.mark.parametrize("width", [2, 3])
def test_one_wide_tree_tells_what_every_smaller_one_accepts(width: int) -> None:
    chance = torch.Generator().manual_seed(width)
    table = torch.randn(VOCAB, VOCAB, generator=chance) * 3
    truth = torch.multinomial(table.softmax(-1), 1, generator=chance)[:, 0]
    whole = f"tree:4x{width}x{1 + width + 3 * width**2}"
    wide = grown(whole, table)
    count, path = accepted(wide, truth, 4)
    found = ranks(Outcome(wide.scores, wide.depths, path, count + 1), 4)
    calibration = Calibration(parse_shape(whole), 0.0, 0.0, 0.0, 0.0, found)
    seen = set()
    for depth in (1, 2, 3, 4):
        for nodes in range(2, 2 + width + (depth - 1) * width**2):
            small, _ = accepted(grown(f"tree:{depth}x{width}x{nodes}", table), truth, depth)
            assert calibration.tokens(depth, nodes) == pytest.approx(1 + small.double().mean().item())
            seen.add(calibration.tokens(depth, nodes))
    assert len(seen) > 5, "the trees differ in what they accept"
    alpha = calibration.alpha()
    assert alpha[0] == pytest.approx((count >= 1).double().mean().item())
    assert alpha[1] == pytest.approx(((count >= 2).sum() / (count >= 1).sum()).item())


def test_rows_that_take_no_part_say_nothing() -> None:
    proposal = grown("chain:3", torch.eye(VOCAB).roll(1, 1))
    path = torch.arange(4).expand(ROWS, -1)
    count = torch.tensor([0, 1, 3, 4] * 4)
    found = ranks(Outcome(proposal.scores, proposal.depths, path, count), 3)
    assert len(found) == 12
    assert found[0].eq(NEVER).all()
    assert found[1].tolist() == [[1, 1, 1], [NEVER, 2, 2], [NEVER] * 3]
    assert found[2, 2].tolist() == [NEVER, NEVER, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_calibration_agrees_with_what_the_runtime_accepts(
    temperature: float, tiny_target: FrozenTarget, pair_head: Any, tiny_prompts: list[Prompt]
) -> None:
    shapes = [parse_shape(text) for text in ("chain:4", "tree:3x2x11")]
    settings = BenchSettings(max_new_tokens=24, batch_size=2)
    calibrations = calibrate(tiny_target, pair_head, shapes, tiny_prompts, temperature, settings)
    for calibration in calibrations:
        assert min(calibration.draft, calibration.verify, calibration.rest, calibration.plain) > 0
        assert len(calibration.ranks) > 20
        per_depth = [
            calibration.tokens(depth, calibration.shape.nodes) for depth in range(1, calibration.shape.depth + 1)
        ]
        assert per_depth == sorted(per_depth) and 1 <= per_depth[0] <= 2
        alpha = [rate or 0.0 for rate in calibration.alpha()]
        chained = 1 + sum(torch.tensor(alpha).cumprod(0).tolist())
        assert per_depth[-1] == pytest.approx(chained, abs=1e-5)
    if temperature == 0:
        assert calibrations[0].tokens(4, 5) > 1.2


def test_what_a_head_refuses_is_not_tried(tiny_target: FrozenTarget, pair_head: Any) -> None:
    class Short:
        def new_state(self, shared: Any, *, batch_size: int, capacity: int, shape: TreeShape, backend: Any) -> None:
            if shape.depth > 2:
                raise UserError("too deep")

    head: Any = Short()
    assert can_draft(head, tiny_target, parse_shape("chain:2"), "match")
    assert not can_draft(head, tiny_target, parse_shape("chain:3"), "match")
    assert not can_draft(pair_head, tiny_target, parse_shape("tree:2x2x5"), "block")
