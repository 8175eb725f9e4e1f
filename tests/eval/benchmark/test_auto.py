"""The cost model on costs whose best is known, the search that measures what it proposes, and its calibration."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eval.benchmark.auto import (
    NEVER,
    Calibration,
    Outcome,
    Point,
    Search,
    beside,
    calibrate,
    calibration_shapes,
    can_draft,
    cost_curve,
    ranks,
)
from eval.benchmark.prompts import Prompt
from eval.benchmark.settings import BenchSettings
from eval.reporting.format import search_line
from eval.runtime.accept import match
from eval.runtime.distribution import RowSampling
from heads.errors import UserError
from heads.growth import grow
from heads.target.model import FrozenTarget
from heads.target.slots import ancestors
from heads.tree import Proposal, parse_shape
from heads.untrained.untrained import Lookup

PLAIN, STEP, NODE, FIXED = 10.0, 1.0, 0.25, 0.5
"""Made-up costs: a plain step, a draft step, a node's verification, what every round costs beside them."""


def synthetic(text: str, alpha: float) -> Calibration:
    """A probe of a draft whose every level is accepted with chance `alpha`, at the made-up costs."""
    shape = parse_shape(text)
    K, rounds = shape.depth, 20_000
    deep = torch.rand(rounds, K, generator=torch.Generator().manual_seed(0)) < alpha
    held = deep.cumprod(1).bool()[:, :, None] & torch.ones(K, K, dtype=torch.bool).triu()
    ranks = torch.where(held, torch.arange(1, K + 1)[:, None], NEVER)
    return Calibration(shape, STEP * K, PLAIN + NODE * shape.nodes, FIXED, PLAIN, ranks)


def best_chain(alpha: float) -> int:
    """The depth with the most tokens a millisecond, by arithmetic."""

    def speed(depth: int) -> float:
        tokens = sum(alpha**k for k in range(depth + 1))
        return tokens / (STEP * depth + PLAIN + NODE * (depth + 1) + FIXED)

    return max(range(1, 11), key=speed)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.95])
def test_the_model_finds_the_depth_that_costs_and_acceptance_give(alpha: float) -> None:
    curve = cost_curve([synthetic(text, alpha) for text in ("chain:10", "chain:5", "chain:1")])
    assert [point.tree for point in curve] == [f"chain:{k}" for k in range(1, 11)]
    best = Search([], curve).proposed[0]
    assert abs(best.depth - best_chain(alpha)) <= (1 if alpha == 0.95 else 0)
    for point in curve:
        tokens = sum(alpha**k for k in range(point.depth + 1))
        assert point.tokens == pytest.approx(tokens, rel=0.05)
        cost = STEP * point.depth + PLAIN + NODE * point.nodes + FIXED
        assert point.round_ms == pytest.approx(1e3 * cost)
        assert point.speedup == pytest.approx(point.tokens * PLAIN / cost)


def point(tree: str, speedup: float) -> Point:
    shape = parse_shape(tree)
    return Point(tree, shape.depth, shape.nodes, shape.top_k, 2.0, 5.0, speedup)


def measured(tree: str, speedup: float | None) -> dict[str, Any]:
    times = {"tau": {"mean": 4.0}, "baseline": {"ms_per_token": 1.0}}
    return {"tree": tree, "speedup": None if speedup is None else {"measured": speedup}, **times}


CURVE = [point(f"chain:{k}", 1 + 0.1 * k) for k in range(1, 7)] + [
    point("tree:2x2x7", 1.2),
    point("tree:3x2x8", 1.3),
    point("tree:3x2x11", 1.25),
]


def test_neighbours_are_one_step_away() -> None:
    by_tree = {p.tree: p for p in CURVE}
    assert [p.tree for p in beside(by_tree["chain:6"], CURVE)] == ["chain:5"]
    assert [p.tree for p in beside(by_tree["chain:3"], CURVE)] == ["chain:2", "chain:4"]
    assert [p.tree for p in beside(by_tree["tree:3x2x8"], CURVE)] == ["tree:3x2x11", "tree:2x2x7"]
    assert [p.tree for p in beside(by_tree["tree:2x2x7"], CURVE)] == ["tree:3x2x8"]


def test_the_model_proposes_and_measurement_chooses() -> None:
    search = Search([], CURVE, fixed=[parse_shape("chain:9")])
    first = [str(shape) for shape in search.next_shapes()]
    assert first == ["chain:9", "chain:6", "tree:3x2x8", "chain:5"]
    # The model was wrong: shorter is faster. The search goes on to where a neighbour is no better.
    speeds = {"chain:9": 0.5, "chain:6": 1.0, "tree:3x2x8": 0.9, "chain:5": 1.1, "chain:4": 1.3, "chain:3": 1.2}
    asked = []
    while shapes := search.next_shapes():
        asked.append([str(shape) for shape in shapes])
        search.take(measured(str(shape), speeds[str(shape)]) for shape in shapes)
    assert asked == [first, ["chain:4"], ["chain:3"]]
    assert search.chosen == "chain:4" and search.measured == speeds


def test_a_failed_audit_or_a_winner_off_the_curve_ends_the_search() -> None:
    search = Search([], CURVE)
    search.take([measured("chain:6", None), measured("chain:5", 1.5)])
    assert search.next_shapes() == []
    search = Search([], CURVE, fixed=[parse_shape("static:2.2")])
    search.take([measured("static:2.2", 3.0), measured("chain:6", 1.0)])
    assert search.next_shapes() == [] and search.chosen == "static:2.2"


@pytest.mark.usefixtures("true_limits")
def test_nothing_is_concluded_from_a_speedup_that_is_not_reliable() -> None:
    search = Search([synthetic("chain:6", 0.5)], CURVE)
    search.take([measured("chain:6", 9.0), measured("chain:5", 1.2)])
    assert search.chosen == "chain:5" and search.unreliable == ["chain:6"]
    assert [str(shape) for shape in search.next_shapes()] == ["chain:4"], "no tree is measured twice"
    assert search_line(search.record(0.0)).endswith("of 1 measured reliably and 1 not, chain:5 is the fastest (1.20x)")
    search = Search([synthetic("chain:6", 0.5)], CURVE)
    search.take([measured("chain:6", 9.0), measured("chain:5", 8.0)])
    assert search.next_shapes() == [] and search.chosen is None
    said = search_line(search.record(0.0))
    assert "none of them is chosen" in said and "9.00" not in said and "8.00" not in said


def test_only_what_a_head_drafts_is_probed(tiny_target: FrozenTarget, pair_head: Any, small_head: Any) -> None:
    texts = [str(shape) for shape in calibration_shapes(Lookup(3), tiny_target)]
    assert texts == ["chain:10", "chain:5", "chain:1"]
    texts = [str(shape) for shape in calibration_shapes(pair_head, tiny_target)]
    assert texts[3:] == ["tree:8x2x31", "tree:2x2x7", "tree:8x4x64", "tree:2x4x8", "tree:8x8x64", "tree:2x8x8"]
    texts = [str(shape) for shape in calibration_shapes(pair_head, tiny_target, "ratio")]
    assert texts == ["chain:10", "chain:5", "chain:1"], "no rule but match judges dynamic trees"
    texts = [str(shape) for shape in calibration_shapes(small_head, tiny_target)]
    assert texts == ["chain:2", "chain:1", "tree:2x2x7"]
    small_head.deepest = 0
    with pytest.raises(UserError, match="drafts no chain"):
        calibration_shapes(small_head, tiny_target)
    assert can_draft(pair_head, tiny_target, parse_shape("chain:3"), "match")
    assert not can_draft(pair_head, tiny_target, parse_shape("tree:2x2x5"), "block")


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
