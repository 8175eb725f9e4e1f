"""Search for the fastest draft of a head on a target on this machine (`--tree auto`).

A calibration on a few prompts measures how deep drafts are accepted and the costs of a round's parts. The cost model

    speedup(shape) = tokens per round * plain step / (draft + verify + rest)

predicts a curve over chains and dynamic trees. The best setting and its neighbours are then measured like any other
setting, on all prompts. If a neighbour wins, its own neighbours are measured too. The chosen setting is always one that
was measured.

One wide tree shows the acceptance of every smaller tree of its width. A tree with fewer nodes or levels keeps the
likeliest of the same candidates, so it contains a node of the accepted path exactly if the node's rank among the
candidates of its levels is good enough. So the rounds of one run are enough for the whole curve.

Letters: B batch, N nodes, K depth, R rounds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.benchmark.measure import line_up, profile, replayed_phases
from eval.benchmark.metrics import predicted_speedup
from eval.benchmark.prompts import Prompt, spread
from eval.benchmark.reliability import why_unreliable
from eval.benchmark.results import Results
from eval.benchmark.settings import BenchSettings
from eval.command import AUTO
from eval.runtime.sampling import check_rule
from heads.base import Drafter, Observation, Pick, SharedLayers
from heads.errors import UserError
from heads.growth import DEPTH_PENALTY
from heads.target.model import FrozenTarget
from heads.tree import Proposal, TreeShape, parse_shape

LONGEST_CHAIN, DEEPEST_TREE = 10, 8
WIDTHS = (2, 4, 8)
"""Numbers of nodes expanded at each level of a tree."""
NODES = (8, 12, 16, 24, 32, 48, 64)
LARGEST_TREE = NODES[-1]
CALIBRATION_PROMPTS, CALIBRATION_TOKENS = 8, 64
MOST_COMPARISONS = 4
NEVER = 1 << 30
"""Rank of a node that was not accepted: no tree contains it."""


@dataclass(frozen=True)
class Calibration:
    """Measurements of one draft."""

    shape: TreeShape
    draft: float
    """Seconds per round of drafting. `verify` and `rest`: of verification, and of accept and commit together."""
    verify: float
    rest: float
    plain: float
    """Seconds of a plain step, measured in the same minute."""
    ranks: Tensor  # (R, K, K) int64: [r, d - 1, k - 1] is the rank of the accepted node at depth d among k levels

    def tokens(self, depth: int, nodes: int) -> float:
        """Return the mean tokens per round with `depth` levels and `nodes` nodes, bonus token included."""
        held = self.ranks[:, :depth, depth - 1] < nodes  # (R, depth)
        return 1.0 + float(held.sum(dim=1).double().mean())

    def costs_ms(self) -> Results:
        """Return the costs in milliseconds."""
        seconds = {"draft": self.draft, "verify": self.verify, "rest": self.rest, "plain": self.plain}
        milliseconds = {name: 1e3 * value for name, value in seconds.items()}
        return {"tree": str(self.shape), "nodes": self.shape.nodes, **milliseconds}

    def alpha(self) -> list[float | None]:
        """Return the acceptance by depth of the whole draft."""
        accepted = (self.ranks[:, :, -1] < NEVER).sum(dim=1)  # (R,)
        at_least = [int((accepted >= k).sum()) for k in range(self.shape.depth + 1)]
        return [deeper / tested if tested else None for tested, deeper in pairwise(at_least)]


@dataclass(frozen=True)
class Point:
    """One setting on the curve."""

    tree: str
    depth: int
    nodes: int
    width: int
    tokens: float
    """Predicted tokens per round: tau."""
    round_ms: float
    speedup: float


@dataclass
class Search:
    """Search for the fastest draft of one head at one temperature."""

    calibrations: list[Calibration]
    curve: list[Point]
    fixed: list[TreeShape] = field(default_factory=list)
    """Shapes that are measured regardless of the curve."""
    measured: dict[str, float] = field(default_factory=dict)
    """Measured speedup by tree, of those that are reliable."""
    unreliable: list[str] = field(default_factory=list)
    """Trees that were measured while something else used the machine, or on too few tokens."""
    comparisons: int = 0

    @property
    def proposed(self) -> list[Point]:
        """The best chain and the best tree according to the model, the better of the two first."""
        families = [[p for p in self.curve if (p.width == 1) == chain] for chain in (True, False)]
        best = [max(family, key=lambda p: p.speedup) for family in families if family]
        return sorted(best, key=lambda p: -p.speedup)

    @property
    def chosen(self) -> str | None:
        """The fastest setting measured reliably. Plain decoding may be even faster."""
        return max(self.measured, key=lambda tree: self.measured[tree]) if self.measured else None

    def next_shapes(self) -> list[TreeShape]:
        """Return the settings to measure next: first the fixed ones, the model's proposals and the neighbours of its
        best; later the neighbours of the winner. The list is empty once all of these are measured."""
        if self.comparisons == MOST_COMPARISONS or (self.comparisons and not self.measured):
            return []
        if self.comparisons == 0:
            centre = self.proposed[0]
            wanted = [*(shape.text for shape in self.fixed), *(p.tree for p in self.proposed)]
        else:
            points = {p.tree: p for p in self.curve}
            if self.chosen not in points:
                return []
            centre, wanted = points[self.chosen], []
        wanted += [p.tree for p in beside(centre, self.curve)]
        fixed, tried = {shape.text: shape for shape in self.fixed}, {*self.measured, *self.unreliable}
        return [fixed.get(tree) or parse_shape(tree) for tree in dict.fromkeys(wanted) if tree not in tried]

    def take(self, measurements: Iterable[Results]) -> None:
        """Add the figures of one comparison. If an output was not exact, there is no speedup and the search ends.
        Nothing is concluded from a speedup that is not reliable."""
        self.comparisons += 1
        for m in measurements:
            if m["speedup"] is None:
                self.comparisons = MOST_COMPARISONS
            elif why_unreliable(m) is not None:
                self.unreliable.append(m["tree"])
            else:
                self.measured[m["tree"]] = m["speedup"]["measured"]

    def record(self, temperature: float) -> Results:
        """Return the entry for results.json."""
        longest = next(c for c in self.calibrations if c.shape.top_k == 1)
        return {
            "temperature": temperature,
            "alpha": longest.alpha(),
            "costs_ms": [calibration.costs_ms() for calibration in self.calibrations],
            "curve": [asdict(point) for point in self.curve],
            "proposed": [point.tree for point in self.proposed],
            "measured": self.measured,
            "unreliable": self.unreliable,
            "chosen": self.chosen,
            "plain_is_faster": self.chosen is not None and self.measured[self.chosen] < 1,
        }


def start_search(
    target: FrozenTarget,
    head: Drafter,
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
    fixed: Sequence[TreeShape],
) -> Search:
    """Run the calibration on a few prompts, spread over all of them. The shapes `fixed` are measured regardless of its
    result. Raise UserError if the head drafts no chain."""
    shapes = calibration_shapes(head, target, settings.rule)
    short = min(settings.max_new_tokens, CALIBRATION_TOKENS)
    bare = replace(settings, max_new_tokens=short)
    calibrations = calibrate(target, head, shapes, spread(prompts, CALIBRATION_PROMPTS), temperature, bare)
    return Search(calibrations, cost_curve(calibrations), list(fixed))


def calibration_shapes(head: Drafter, target: FrozenTarget, rule: str = "match") -> list[TreeShape]:
    """Return the longest chain that the head drafts, one of half its length and one of length 1, and for each width a
    large tree and a small one."""

    def deepest(texts: Sequence[str]) -> str | None:
        return next((text for text in texts if can_draft(head, target, parse_shape(text), rule)), None)

    longest = deepest([f"chain:{k}" for k in range(LONGEST_CHAIN, 0, -1)])
    if longest is None:
        raise UserError(f"--tree {AUTO}: this head drafts no chain; name its tree")
    depth = parse_shape(longest).depth
    texts = [f"chain:{k}" for k in sorted({depth, (1 + depth) // 2, 1}, reverse=True)]
    for width in WIDTHS:
        wide = deepest([tree_text(depth, width, LARGEST_TREE) for depth in range(DEEPEST_TREE, 1, -1)])
        texts += [wide, tree_text(2, width, NODES[0])] if wide else []
    return [parse_shape(text) for text in dict.fromkeys(texts)]


def tree_text(depth: int, width: int, nodes: int) -> str:
    """Return the name of a dynamic tree of `nodes` nodes, or as many as its levels can have."""
    return f"tree:{depth}x{width}x{min(nodes, 1 + width + (depth - 1) * width**2)}"


def cost_curve(calibrations: Sequence[Calibration]) -> list[Point]:
    """Return the model's prediction for every setting in the range of the calibrations."""
    plain = float(np.mean([c.plain for c in calibrations]))
    points = []
    for shape, calibration in candidates(calibrations):
        tokens = calibration.tokens(shape.depth, shape.nodes)
        seconds = round_seconds(shape, calibrations)
        speedup = predicted_speedup(tokens, plain_seconds=plain, round_seconds=seconds)
        points.append(Point(shape.text, shape.depth, shape.nodes, shape.top_k, tokens, 1e3 * seconds, speedup))
    return points


def candidates(calibrations: Sequence[Calibration]) -> list[tuple[TreeShape, Calibration]]:
    """Return every chain and tree in the calibrated range, each with the calibration that shows its acceptance: the
    largest of the same width."""
    found = []
    largest = {c.shape.top_k: c for c in sorted(calibrations, key=lambda c: c.shape.nodes)}
    for width, calibration in sorted(largest.items()):
        if width == 1:
            texts = [f"chain:{k}" for k in range(1, calibration.shape.depth + 1)]
        else:
            nodes = sorted({n for n in NODES if n < calibration.shape.nodes} | {calibration.shape.nodes})
            depths = range(2, calibration.shape.depth + 1)
            texts = [tree_text(depth, width, n) for depth in depths for n in nodes if n > depth]
        found += [(parse_shape(text), calibration) for text in dict.fromkeys(texts)]
    return found


def round_seconds(shape: TreeShape, calibrations: Sequence[Calibration]) -> float:
    """Return the seconds of a round, interpolated linearly between calibrations: drafting by depth among those of the
    same width, verification and the rest by nodes among chains or among trees."""
    same_width = [c for c in calibrations if c.shape.top_k == shape.top_k]
    same_form = [c for c in calibrations if (c.shape.top_k == 1) == (shape.top_k == 1)]
    drafting = between(shape.depth, [(c.shape.depth, c.draft) for c in same_width])
    return drafting + between(shape.nodes, [(c.shape.nodes, c.verify + c.rest) for c in same_form])


def between(x: float, points: Sequence[tuple[float, float]]) -> float:
    """Return the value at x, interpolated linearly between the points. Points with the same x are averaged."""
    places = sorted({place for place, _ in points})
    means = [float(np.mean([value for place, value in points if place == p])) for p in places]
    return float(np.interp(x, places, means))


def beside(centre: Point, curve: Sequence[Point]) -> list[Point]:
    """Return the neighbours of a setting: chains one token shorter or longer, trees one level or one size smaller or
    larger."""
    depth_first = [p for p in curve if p.width == centre.width and p.tree != centre.tree]
    if centre.width == 1:
        return [p for p in depth_first if abs(p.depth - centre.depth) == 1]
    sizes = sorted({p.nodes for p in depth_first if p.depth == centre.depth} | {centre.nodes})
    place = sizes.index(centre.nodes)
    near = {sizes[i] for i in (place - 1, place + 1) if 0 <= i < len(sizes)}
    found = [p for p in depth_first if p.depth == centre.depth and p.nodes in near]
    for depth in (centre.depth - 1, centre.depth + 1):
        level = [p for p in depth_first if p.depth == depth]
        found += sorted(level, key=lambda p: (abs(p.nodes - centre.nodes), p.nodes))[:1]
    return found


def calibrate(
    target: FrozenTarget,
    head: Drafter,
    shapes: Sequence[TreeShape],
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
) -> list[Calibration]:
    """Decode `prompts` once with each shape, in turns with plain decoding."""
    recorded = [Recorded(head) for _ in shapes]
    comparison = line_up(target, list(zip(recorded, shapes, strict=True)), prompts, temperature, settings)
    replayed = replayed_phases(comparison)
    for head in recorded:
        head.outcomes.clear()  # of the warm-up and the replays
    profiled = profile(comparison, len(prompts))  # it launches every round, so that its outcome is recorded
    if not all(head.outcomes for head in recorded):
        raise UserError(
            f"--tree auto: every output of the {len(prompts)} prompts tried ended with its first token, which the "
            "prefill gives; name a tree, use other prompts, or allow more new tokens"
        )
    return [
        Calibration(
            shape,
            phases["draft"],
            phases["verify"],
            phases["accept"] + phases["commit"],
            phases["plain"],
            torch.cat([ranks(outcome, shape.depth) for outcome in head.outcomes]),
        )
        for shape, phases, head in zip(shapes, replayed or profiled, recorded, strict=True)
    ]


@dataclass(frozen=True)
class Outcome:
    """Proposal of one round, and the accepted path."""

    scores: Tensor  # (B, N)
    depths: Tensor  # (B, N)
    path: Tensor  # (B, K + 1), nodes, the root first
    count: Tensor  # (B,), number of accepted nodes in `path`, the root included; 0 for a row that takes no part


class Recorded(Drafter):
    """Drafter that records the outcomes of another drafter's proposals. They are analysed only after all timing."""

    def __init__(self, head: Drafter) -> None:
        self.head, self.aux_layer_ids = head, head.aux_layer_ids
        self.proposal: Proposal | None = None
        self.outcomes: list[Outcome] = []

    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> Any:
        return self.head.new_state(shared, batch_size=batch_size, capacity=capacity, shape=shape)

    def reset_rows(self, state: Any, rows: Tensor) -> None:
        self.head.reset_rows(state, rows)

    def propose(self, state: Any, pick: Pick) -> Proposal:
        self.proposal = self.head.propose(state, pick)
        return self.proposal

    def extend(self, state: Any, observation: Observation) -> None:
        if observation.nodes is not None:
            assert self.proposal is not None
            kept = (self.proposal.scores, self.proposal.depths, observation.nodes, observation.count)
            self.outcomes.append(Outcome(*(tensor.clone() for tensor in kept)))
        self.head.extend(state, observation)


def ranks(outcome: Outcome, depth: int) -> Tensor:
    """Return (R, K, K) int64, `Calibration.ranks` of the rows that took part."""
    rows = outcome.count > 0
    depths, path, count = outcome.depths[rows], outcome.path[rows], outcome.count[rows]
    key = outcome.scores[rows].float() - DEPTH_PENALTY * depths
    key[:, 0] = torch.inf
    level = torch.arange(1, depth + 1, device=key.device)
    own = key.gather(1, path[:, 1:])  # (R, K)
    better = key[:, None] > own[..., None]  # (R, K, N)
    within = depths[:, None] <= level[:, None]  # (R, K levels, N)
    rank = (better[:, :, None] & within[:, None]).sum(dim=3)  # (R, K, K)
    accepted = level[None, :, None] < count[:, None, None]
    return torch.where(accepted & (level[:, None] <= level), rank, NEVER).cpu()


def can_draft(head: Drafter, target: FrozenTarget, shape: TreeShape, rule: str) -> bool:
    """Return True if the head can draft trees of this shape, the rule can judge them and the target can verify them."""
    try:
        check_rule(rule, shape)
        target.check_shape(shape)
        head.check_draft(shape, shape.nodes)
    except UserError:
        return False
    return True
