"""The cost model on costs whose best is known, and the search that measures what it proposes."""

from typing import Any

import pytest
import torch

from eval.benchmark.auto import Point, Search, beside, between, calibration_shapes, cost_curve
from eval.benchmark.tune import NEVER, Calibration
from heads.errors import UserError
from heads.lookup import Lookup, LookupConfig
from heads.target.frozen import FrozenTarget
from heads.tree import TreeShape, parse_shape

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
    """By arithmetic: the depth with the most tokens a millisecond."""

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


def test_trees_are_on_the_curve_up_to_what_was_probed() -> None:
    calibrations = [synthetic(text, 0.5) for text in ("chain:4", "chain:1", "tree:4x2x15", "tree:2x2x7")]
    trees = [point for point in cost_curve(calibrations) if point.width == 2]
    assert {point.depth for point in trees} == {2, 3, 4}
    assert max(point.nodes for point in trees) == 15 and len(trees) == len({point.tree for point in trees})
    assert all(parse_shape(point.tree).nodes == point.nodes for point in trees)


def test_costs_lie_on_the_line_between_what_was_measured() -> None:
    assert between(3, [(1, 10.0), (5, 30.0)]) == 20.0
    assert between(3, [(1, 10.0), (3, 4.0), (3, 6.0), (5, 30.0)]) == 5.0
    assert between(9, [(1, 10.0), (5, 30.0)]) == 30.0


def point(tree: str, speedup: float) -> Point:
    shape = parse_shape(tree)
    return Point(tree, shape.depth, shape.nodes, shape.top_k, 2.0, 5.0, speedup)


def measured(tree: str, speedup: float | None) -> dict[str, Any]:
    return {"tree": tree, "speedup": None if speedup is None else {"measured": speedup}}


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


def test_nothing_is_chosen_where_the_audit_failed() -> None:
    search = Search([], CURVE)
    search.take([measured("chain:6", None), measured("chain:5", 1.5)])
    assert search.next_shapes() == []


def test_a_winner_off_the_curve_ends_the_search() -> None:
    search = Search([], CURVE, fixed=[parse_shape("static:2.2")])
    search.take([measured("static:2.2", 3.0), measured("chain:6", 1.0)])
    assert search.next_shapes() == []
    assert search.chosen == "static:2.2"


def test_only_what_a_head_drafts_is_probed(tiny_target: FrozenTarget, pair_head: Any) -> None:
    texts = [str(shape) for shape in calibration_shapes(Lookup(LookupConfig()), tiny_target)]
    assert texts == ["chain:10", "chain:5", "chain:1"]
    texts = [str(shape) for shape in calibration_shapes(pair_head, tiny_target)]
    assert texts[3:] == ["tree:8x2x31", "tree:2x2x7", "tree:8x4x64", "tree:2x4x8", "tree:8x8x64", "tree:2x8x8"]
    texts = [str(shape) for shape in calibration_shapes(pair_head, tiny_target, "ratio")]
    assert texts == ["chain:10", "chain:5", "chain:1"], "no rule but match judges dynamic trees"

    class Mute:
        def new_state(self, shared: Any, *, batch_size: int, capacity: int, shape: TreeShape, backend: Any) -> None:
            raise UserError("never")

    head: Any = Mute()
    with pytest.raises(UserError, match="drafts no chain"):
        calibration_shapes(head, tiny_target)
