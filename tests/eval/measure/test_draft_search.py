"""The search for the fastest draft: looks at a grid, halved until few are left, which are measured."""

from functools import partial
from typing import Any

from eval.data.prompts import Prompt
from eval.measure import draft_search
from eval.measure.draft_search import FINALISTS, GRID, can_draft, choose_draft, search_drafts
from eval.pages.verdicts import search_line
from eval.records.measure_settings import BenchSettings
from eval.records.schema import Look, Search
from heads.core.tree import parse_shape
from heads.targets.frozen_target import FrozenTarget
from tests.eval.conftest import altered
from tests.support.annotations import Patch
from tests.support.measurements import measurement
from tests.support.refusals import refused

Prompts = list[Prompt]


def test_the_faster_half_stays_and_is_looked_at_on_twice_as_many_prompts(
    tiny_target: FrozenTarget, pair_head: Any, tiny_prompts: Prompts, monkeypatch: Patch
) -> None:
    """A machine on which a draft is the faster the nearer its number of nodes is to 5."""
    seen: list[tuple[int, int]] = []

    def look_at(target: Any, drafts: Any, prompts: Any, *_: Any) -> list[Look]:
        seen.append((len(drafts), len(prompts)))
        return [Look(tree=s.text, depth=s.depth, width=1, speedup=1 / (1 + abs(s.nodes - 5))) for _, s in drafts]

    monkeypatch.setattr(draft_search, "look_at", look_at)
    prompts = tiny_prompts * 8
    search = search_drafts(tiny_target, pair_head, prompts, 0.0, BenchSettings())
    assert seen == [(18, 4), (9, 8)] and {look.tree for look in search.curve} == {*GRID}
    assert sorted(abs(parse_shape(tree).nodes - 5) for tree in search.proposed) == [0, 1, 1, 2]


def test_a_look_decodes_with_every_draft(tiny_target: FrozenTarget, pair_head: Any, tiny_prompts: Prompts) -> None:
    trees = ["chain:1", "chain:4", "tree:3x2x8"]
    drafts = [(pair_head, parse_shape(tree)) for tree in trees]
    look_at = partial(draft_search.look_at, tiny_target, drafts, tiny_prompts[:3], 0.0)
    looks = look_at(BenchSettings(max_new_tokens=24))
    assert [look.tree for look in looks] == trees and looks[0].tokens < looks[1].tokens
    assert all(look.speedup > 0 and look.tokens > 1.1 for look in looks)
    fault = refused(look_at, BenchSettings(max_new_tokens=1))
    assert "every output ended with its first token" in fault


def test_only_what_a_head_drafts_is_looked_at(tiny_target: FrozenTarget, pair_head: Any, tiny_prompts: Prompts) -> None:
    small_head = altered(pair_head, deepest=2)
    search = search_drafts(tiny_target, small_head, tiny_prompts, 0.0, BenchSettings())
    assert search.proposed == ["chain:1", "chain:2", "tree:2x2x7"] and not search.curve
    assert len(search.proposed) < FINALISTS, "so few need no look"
    small_head.deepest = 0
    assert "drafts no chain" in refused(search_drafts, tiny_target, small_head, tiny_prompts, 0.0, BenchSettings())
    assert can_draft(pair_head, tiny_target, parse_shape("chain:3"), "match")
    assert not can_draft(pair_head, tiny_target, parse_shape("tree:2x2x5"), "block")


def test_nothing_is_concluded_from_a_speedup_that_is_not_reliable() -> None:
    search = Search(temperature=0.0, curve=[], proposed=["chain:6", "chain:5"])
    choose_draft(search, [measurement("chain:6", speedup=9.0), measurement("chain:5", speedup=1.2)])
    line = search_line(search)
    assert line.endswith("of 1 measured reliably and 1 not, chain:5 is chosen (1.20x)") and "9.0" not in line
    search = Search(temperature=0.0, curve=[], proposed=["chain:6"])
    choose_draft(search, [measurement("chain:6", speedup=9.0), measurement("chain:5", speedup=None)])
    assert search.chosen is None and search.unreliable == ["chain:6"]
    assert "none of them is chosen" in search_line(search) and "9.0" not in search_line(search)
