"""`--tree auto`: the draft that is fastest for a head on a target, here and now.

A calibration on a few prompts measures how deep drafts are accepted and what a round's parts cost; the cost model

    speedup(shape) = tokens a round emits * plain step / (draft + verify + rest)

gives a curve over chains and dynamic trees. Its best setting and the settings beside it are then measured like any
other, on all prompts; should one beside it win, so are the ones beside that. What is chosen was always measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from eval.benchmark.metrics import predicted_speedup
from eval.benchmark.prompts import Prompt, spread
from eval.benchmark.results import Results
from eval.benchmark.settings import BenchSettings
from eval.benchmark.tune import Calibration, calibrate, can_draft
from eval.command import AUTO
from heads.base import Drafter
from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from heads.tree import TreeShape, parse_shape

LONGEST_CHAIN, DEEPEST_TREE = 10, 8
WIDTHS = (2, 4, 8)
"""Nodes expanded at each level of a tree."""
NODES = (8, 12, 16, 24, 32, 48, 64)
LARGEST_TREE = NODES[-1]
CALIBRATION_PROMPTS, CALIBRATION_TOKENS = 8, 64
MOST_COMPARISONS = 4


@dataclass(frozen=True)
class Point:
    """One setting on the curve."""

    tree: str
    depth: int
    nodes: int
    width: int
    tokens: float
    """Tokens a round is expected to emit: tau."""
    round_ms: float
    speedup: float


@dataclass
class Search:
    """Search for the best of one head's drafts at one temperature."""

    calibrations: list[Calibration]
    curve: list[Point]
    fixed: list[TreeShape] = field(default_factory=list)
    """Shapes that are measured in any case."""
    measured: dict[str, float] = field(default_factory=dict)
    """Tree -> speedup."""
    comparisons: int = 0

    @property
    def proposed(self) -> list[Point]:
        """The best chain and the best tree by the model, the better first."""
        families = [[p for p in self.curve if (p.width == 1) == chain] for chain in (True, False)]
        best = [max(family, key=lambda p: p.speedup) for family in families if family]
        return sorted(best, key=lambda p: -p.speedup)

    @property
    def chosen(self) -> str | None:
        """The fastest setting measured; plain decoding may be faster still."""
        return max(self.measured, key=lambda tree: self.measured[tree]) if self.measured else None

    def next_shapes(self) -> list[TreeShape]:
        """Return the settings to measure next: first the model's proposals and the neighbours of its best, then the
        neighbours of the winner. None are left once all of these are measured."""
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
        fixed = {shape.text: shape for shape in self.fixed}
        return [fixed.get(tree) or parse_shape(tree) for tree in dict.fromkeys(wanted) if tree not in self.measured]

    def take(self, measurements: Iterable[Results]) -> None:
        """Note the figures of one comparison. None is stated of an output that was not the target's own."""
        self.comparisons += 1
        for m in measurements:
            if m["speedup"] is None:
                self.comparisons = MOST_COMPARISONS
            else:
                self.measured[m["tree"]] = m["speedup"]["measured"]

    def record(self, temperature: float) -> Results:
        """Return the entry in results.json."""
        longest = next(calibration for calibration in self.calibrations if calibration.shape.top_k == 1)
        return {
            "temperature": temperature,
            "alpha": longest.alpha(),
            "costs_ms": [cost_record(calibration) for calibration in self.calibrations],
            "curve": [asdict(point) for point in self.curve],
            "proposed": [point.tree for point in self.proposed],
            "measured": self.measured,
            "chosen": self.chosen,
            "plain_is_faster": self.chosen is not None and self.measured[self.chosen] < 1,
        }


def cost_record(calibration: Calibration) -> Results:
    """Costs of a calibration in milliseconds."""
    parts = {
        "draft": calibration.draft,
        "verify": calibration.verify,
        "rest": calibration.rest,
        "plain": calibration.plain,
    }
    return {"tree": str(calibration.shape), "nodes": calibration.shape.nodes} | {
        name: 1e3 * s for name, s in parts.items()
    }


def start_search(
    target: FrozenTarget,
    head: Drafter,
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
    fixed: Sequence[TreeShape] = (),
) -> Search:
    """Run the calibration, on prompts spread over all of them; the shapes `fixed` are measured whatever it says.
    UserError if the head drafts nothing that is looked for."""
    shapes = calibration_shapes(head, target, settings.rule)
    short = min(settings.max_new_tokens, CALIBRATION_TOKENS)
    bare = replace(settings, max_new_tokens=short, adaptive=False, strict=False)
    calibrations = calibrate(target, head, shapes, spread(prompts, CALIBRATION_PROMPTS), temperature, bare)
    return Search(calibrations, cost_curve(calibrations), list(fixed))


def calibration_shapes(head: Drafter, target: FrozenTarget, rule: str = "match") -> list[TreeShape]:
    """The longest chain that the head drafts, a short and a middling one, and for each width a wide tree and a slim
    one."""

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
    """A dynamic tree of at most `nodes`, as many as its levels give."""
    return f"tree:{depth}x{width}x{min(nodes, 1 + width + (depth - 1) * width**2)}"


def cost_curve(calibrations: Sequence[Calibration]) -> list[Point]:
    """The model's figures for every setting that the calibrations speak of."""
    plain = float(np.mean([calibration.plain for calibration in calibrations]))
    points = []
    for shape, calibration in candidates(calibrations):
        tokens = calibration.tokens(shape.depth, shape.nodes)
        draft, verify, rest = costs(shape, calibrations)
        speedup = predicted_speedup(tokens, plain_seconds=plain, draft=draft, verify=verify, rest=rest)
        points.append(
            Point(shape.text, shape.depth, shape.nodes, shape.top_k, tokens, 1e3 * (draft + verify + rest), speedup)
        )
    return points


def candidates(calibrations: Sequence[Calibration]) -> list[tuple[TreeShape, Calibration]]:
    """Return every chain and tree inside the calibrated range, with the calibration that has its acceptance: the
    largest of its width."""
    found = []
    largest = {
        calibration.shape.top_k: calibration
        for calibration in sorted(calibrations, key=lambda calibration: calibration.shape.nodes)
    }
    for width, calibration in sorted(largest.items()):
        if width == 1:
            texts = [f"chain:{k}" for k in range(1, calibration.shape.depth + 1)]
        else:
            nodes = sorted({n for n in NODES if n < calibration.shape.nodes} | {calibration.shape.nodes})
            depths = range(2, calibration.shape.depth + 1)
            texts = [tree_text(depth, width, n) for depth in depths for n in nodes if n > depth]
        found += [(parse_shape(text), calibration) for text in dict.fromkeys(texts)]
    return found


def costs(shape: TreeShape, calibrations: Sequence[Calibration]) -> tuple[float, float, float]:
    """Seconds of draft, verification and the rest of a round: between the measured ones, in a straight line. Drafting
    goes by levels among calibrations of the same width, the others by nodes among chains or among trees."""
    same_width = [calibration for calibration in calibrations if calibration.shape.top_k == shape.top_k]
    same_form = [calibration for calibration in calibrations if (calibration.shape.top_k == 1) == (shape.top_k == 1)]
    return (
        between(shape.depth, [(calibration.shape.depth, calibration.draft) for calibration in same_width]),
        between(shape.nodes, [(calibration.shape.nodes, calibration.verify) for calibration in same_form]),
        between(shape.nodes, [(calibration.shape.nodes, calibration.rest) for calibration in same_form]),
    )


def between(x: float, points: Sequence[tuple[float, float]]) -> float:
    """The value at x of the line through the points; where several share an x, through their mean."""
    places = sorted({place for place, _ in points})
    means = [float(np.mean([value for place, value in points if place == p])) for p in places]
    return float(np.interp(x, places, means))


def beside(centre: Point, curve: Sequence[Point]) -> list[Point]:
    """The settings one step away: a chain one shorter or longer, a tree of one level or of one size more or less."""
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
