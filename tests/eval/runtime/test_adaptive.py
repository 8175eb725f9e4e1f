"""The controller under a clock of ours: what it loses on useless heads, keeps with good ones, and finds again."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pytest

from eval.runtime.adaptive import LONGEST_INTERVAL, Controller, Span, candidates
from eval.runtime.sampling import check_adaptive
from heads.errors import UserError
from heads.tree import TreeShape, parse_shape
from tests.small_targets import open_engine

PLAIN = 1.0
Alpha = Callable[[TreeShape, int], float]
"""(draft, tokens so far) -> how likely each drafted token is accepted, if those before it are."""


@dataclass
class World:
    """Rounds that take and give what it says."""

    shape: str
    alpha: Alpha
    level: float = 0.12
    """Cost of one level of a draft, in plain steps."""
    fixed: float = 0.1
    """Cost of drafting anything at all, in plain steps."""
    batch_size: int = 1
    poll_interval: int = 1
    noise: float = 0.05
    drift: float = 0.0
    """By how much a round of any kind is dearer than the one before."""
    busy: float = 1.0
    """By how much everything is dearer while others use the machine, which they do for some dozens of rounds and then
    not."""
    visits: random.Random = field(default_factory=lambda: random.Random(0))
    """When they come and go."""
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    plain_seconds: float = 0.0
    """Return the time that as many plain rounds would have taken."""
    tokens: int = 0
    scale: float | None = None
    """Times the true chances of acceptance, what the head says of them; None: it says nothing."""
    candidates: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.controller = Controller([parse_shape(name) for name in candidates(parse_shape(self.shape))])
        self.left, self.others = 0, False

    def cost(self, shape: TreeShape, length: int | None = None) -> float:
        grown = 1 + self.drift * sum(self.controller.rounds)
        return grown * (
            PLAIN + bool(shape.depth) * self.fixed + self.level * (shape.depth if length is None else length)
        )

    def chances(self, shape: TreeShape) -> list[list[float]]:
        """The chance of each drafted token of each row to be accepted in the next round."""
        return [[self.alpha(shape, self.tokens // self.batch_size)] * shape.depth] * self.batch_size

    def run(self, tokens: int) -> Self:
        """Go on until each row has that many tokens, on average."""
        controller = self.controller
        while self.tokens < tokens * self.batch_size:
            shape = controller.shapes[controller.candidate]
            seconds, tested, kept, foreseen, length = 0.0, [0] * shape.depth, [0] * shape.depth, 0.0, shape.depth
            scale = self.scale if shape.depth > 1 else None
            for _ in range(self.poll_interval):
                chances = self.chances(shape)
                if scale is not None:
                    length = controller.length(np.array(chances) * scale)
                pace = self.pace()
                seconds += pace * self.cost(shape, length) * (1 + self.noise * self.chance.random())
                self.plain_seconds += pace * PLAIN * (1 + self.noise / 2)
                for row in chances:
                    self.tokens += 1
                    for k in range(shape.depth):
                        tested[k] += 1
                        foreseen += (scale or 0) * row[k] * (k < length)
                        if k == length or self.chance.random() >= row[k]:
                            break
                        kept[k] += 1
                        self.tokens += 1
            self.seconds += seconds
            self.candidates[str(shape)] += self.poll_interval
            said = () if scale is None else (length, foreseen)
            controller.note(Span(self.poll_interval, seconds, tested, kept, *said))
        return self

    def pace(self) -> float:
        """1, or `busy` while others use the machine."""
        if self.left == 0:
            self.left = self.visits.randrange(5, 120)
            self.others = not self.others and self.visits.random() < 0.7
        self.left -= 1
        return self.busy if self.others else 1.0

    def against_plain(self) -> float:
        """Speed over that of plain decoding, which has the same noise."""
        return self.tokens / self.batch_size / sum(self.candidates.values()) * self.plain_seconds / self.seconds


def test_the_candidates_leads_from_the_draft_by_shorter_chains_to_none() -> None:
    assert candidates(parse_shape("chain:5")) == ["chain:5", "chain:3", "chain:2", "chain:1", "none"]
    assert candidates(parse_shape("chain:1")) == ["chain:1", "none"]
    assert candidates(parse_shape("tree:4x4x16")) == ["tree:4x4x16", "chain:4", "chain:3", "chain:2", "chain:1", "none"]


@pytest.mark.parametrize("shape", ["chain:1", "chain:5", "chain:10", "tree:5x4x16"])
@pytest.mark.parametrize(("batch_size", "poll_interval"), [(1, 1), (8, 1), (1, 4)])
@pytest.mark.parametrize("level", [0.05, 0.4])
def test_a_useless_head_costs_almost_nothing(shape: str, batch_size: int, poll_interval: int, level: float) -> None:
    world = World(shape, lambda draft, at: 0.02, level, batch_size=batch_size, poll_interval=poll_interval).run(2000)
    assert world.candidates["none"] > 0.9 * sum(world.candidates.values())
    assert world.against_plain() > 0.96


@pytest.mark.parametrize("alpha", [0.0, 0.02])
def test_nor_does_it_while_others_use_the_machine(alpha: float) -> None:
    """A trial in a quiet minute, or of none in a busy one, must not make a useless draft look cheap."""
    worlds = [World("chain:5", lambda *at: alpha, busy=1.5, visits=random.Random(seed)) for seed in range(30)]
    assert min(world.run(2000).against_plain() for world in worlds) > 0.97


def test_a_good_head_is_kept_while_others_use_the_machine() -> None:
    worlds = [World("chain:5", lambda *at: 0.75, 0.05, busy=1.5, visits=random.Random(seed)) for seed in range(10)]
    always = sum(0.75**k for k in range(6)) / worlds[0].cost(worlds[0].controller.shapes[0])
    assert sum(world.run(3000).against_plain() for world in worlds) > 0.9 * always * len(worlds)


def test_the_longer_it_lasts_the_less_it_costs() -> None:
    def useless(draft: TreeShape, at: int) -> float:
        return 0.02

    short, long = (World("chain:5", useless).run(tokens).against_plain() for tokens in (256, 10_000))
    assert short > 0.95
    assert long > 0.99


@pytest.mark.parametrize("shape", ["chain:5", "tree:5x4x16"])
@pytest.mark.parametrize("seed", range(4))
def test_a_good_head_keeps_its_depth(shape: str, seed: int) -> None:
    def alpha(draft: TreeShape, at: int) -> float:
        return 0.9 if draft.top_k > 1 else 0.8

    world = World(shape, alpha, level=0.05, chance=random.Random(seed)).run(6000)
    always = World(shape, alpha, level=0.05, chance=random.Random(seed))
    top = always.controller.shapes[0]
    a = alpha(top, 0)
    expected = sum(a**k for k in range(top.depth + 1)) / always.cost(top)
    assert world.candidates[shape] > 0.85 * sum(world.candidates.values())
    assert world.against_plain() > 0.95 * expected


@pytest.mark.parametrize("drift", [0.0, 1e-3])
@pytest.mark.parametrize(
    ("alpha", "level", "best"),
    [(0.5, 0.2, {"chain:1", "chain:2"}), (0.8, 0.25, {"chain:3", "chain:2"}), (0.6, 0.05, {"chain:5"})],
)
def test_the_depth_that_pays_is_found(alpha: float, level: float, best: set[str], drift: float) -> None:
    """Whichever depth tokens and costs make the best, most rounds go there, though everything gets dearer."""
    world = World("chain:5", lambda draft, at: alpha, level, fixed=0.0, drift=drift).run(6000)
    speeds = {
        str(s): sum(alpha**k for k in range(s.depth + 1)) / (1 + level * s.depth) for s in world.controller.shapes
    }
    assert max(speeds, key=lambda name: speeds[name]) in best
    near = [name for name, speed in speeds.items() if speed > 0.95 * max(speeds.values())]
    assert sum(world.candidates[name] for name in near) > 0.8 * sum(world.candidates.values())


@pytest.mark.parametrize("shape", ["chain:5", "tree:5x4x16"])
def test_a_head_that_turns_good_again_is_found(shape: str) -> None:
    def alpha(draft: TreeShape, at: int) -> float:
        return 0.02 if 3000 <= at < 9000 else 0.9 if draft.top_k > 1 else 0.75

    world = World(shape, alpha, level=0.05).run(3000)
    assert world.controller.current == 0
    world.run(9000)
    assert world.controller.current == world.controller.none
    before = world.seconds
    world.run(9000 + 3 * LONGEST_INTERVAL)
    assert world.controller.current == 0
    world.run(16000)
    assert 7000 / (world.seconds - before) > 1.8


@dataclass
class Foreseen(World):
    """Rounds of a head that knows how hard the text is: each token is accepted with probability `good` or `bad`, by
    turns of chance."""

    good: float = 0.95
    bad: float = 0.25
    scale: float | None = 1.0

    def chances(self, shape: TreeShape) -> list[list[float]]:
        return [[self.chance.choice((self.good, self.bad)) for _ in range(shape.depth)] for _ in range(self.batch_size)]


@pytest.mark.parametrize("level", [0.15, 0.3])
@pytest.mark.parametrize("scale", [1.0, 0.6])
def test_confidence_saves_the_time_to_verify_what_will_be_refused(scale: float, level: float) -> None:
    """Even if the head says too little: what came of it so far corrects that."""
    silent, confident = (
        Foreseen("chain:7", lambda *at: 0.0, level, scale=said).run(8000).against_plain() for said in (None, scale)
    )
    assert confident > 1.04 * silent


def test_confidence_that_says_nothing_costs_nothing() -> None:
    silent, confident = (
        Foreseen("chain:7", lambda *at: 0.0, 0.05, good=0.8, bad=0.8, scale=said).run(8000).against_plain()
        for said in (None, 1.0)
    )
    assert confident > 0.97 * silent


def test_a_useless_head_with_confidence_is_left_alone() -> None:
    world = Foreseen("chain:7", lambda *at: 0.0, 0.15, good=0.02, bad=0.02).run(4000)
    assert world.against_plain() > 0.96


def test_an_outlier_moves_nothing() -> None:
    world = World("chain:5", lambda draft, at: 0.8, level=0.05).run(500)
    current, candidate, speed = world.controller.current, world.controller.candidate, world.controller.speed(0)
    shape = world.controller.shapes[candidate]
    world.controller.note(Span(1, 1e3, [1] * shape.depth, [1] * shape.depth))
    assert world.controller.current == current
    assert world.controller.speed(0) > 0.9 * speed


def test_plain_decoding_is_not_adaptive(target_of: Any) -> None:
    with pytest.raises(UserError, match="adaptive drafts need a head"):
        open_engine(target_of("llama"), None, max_length=64, adaptive=True)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_rules_whose_text_would_hang_on_the_clock_are_refused(rule: str) -> None:
    check_adaptive("match")
    with pytest.raises(UserError, match=f"rule {rule} with adaptive drafts: .* use rule match"):
        check_adaptive(rule)
