"""Speed and the time between tokens against the depth of the draft: the figures of the plots, and their SVG form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eval.wording import Results, number, with_interval

WIDTH, HEIGHT = 400, 200
MOST_STEPS = 5
"""Of an axis."""
SPREAD = 0.16
"""Between settings of equal depth, in units of depth."""


@dataclass(frozen=True)
class Dot:
    """One setting measured."""

    tree: str
    at: float
    """Its depth, moved a little where others have the same."""
    chain: bool
    speedup: float
    low: float
    high: float
    token_ms: dict[str, float]
    """The time between tokens: p50, p95, p99."""


@dataclass(frozen=True)
class Curves:
    """All settings of the headline's temperature, and what the cost model says where it was asked."""

    dots: list[Dot]
    model: dict[str, list[tuple[int, float]]]
    """`chain` and `tree` -> (depth, speedup by the cost model), the best tree of each depth."""
    plain_ms: dict[str, float]

    @property
    def deepest(self) -> int:
        """Of what was measured."""
        return max(round(dot.at) for dot in self.dots)

    @property
    def deepest_known(self) -> int:
        """Of what was measured or modelled."""
        return max([self.deepest, *(depth for line in self.model.values() for depth, _ in line)])


def depth_curves(results: Results) -> Curves | None:
    """The curves of a results.json; None where too little was measured, or the audit failed."""
    measured = [m for m in results["measurements"] if m["temperature"] == results["temperature"]]
    # Results of an earlier version lack the depth, and the times between tokens.
    if len(measured) < 2 or not all(m["speedup"] and "depth" in m for m in measured):
        return None
    searches = [search for search in results.get("auto", ()) if search["temperature"] == results["temperature"]]
    model: dict[str, dict[int, float]] = {"chain": {}, "tree": {}}
    for point in searches[0]["curve"] if searches else ():
        line = model["chain" if point["width"] == 1 else "tree"]
        line[point["depth"]] = max(point["speedup"], line.get(point["depth"], 0.0))
    dots = []
    for m in measured:
        level = [other["tree"] for other in measured if other["depth"] == m["depth"]]
        shift = SPREAD * (level.index(m["tree"]) - (len(level) - 1) / 2)
        low, high = m["speedup"]["ci95"] or (m["speedup"]["measured"],) * 2
        chain = m["nodes"] == m["depth"] + 1
        speed = m["speedup"]["measured"]  # of few prompts it may lie outside what the bootstrap draws
        low, high = min(low, speed), max(high, speed)
        dots.append(Dot(m["tree"], m["depth"] + shift, chain, speed, low, high, m["speculative"]["token_ms"]))
    lines = {name: sorted(line.items()) for name, line in model.items()}
    return Curves(dots, lines, measured[0]["baseline"]["token_ms"])


def speedup_chart(curves: Curves) -> Results:
    """Speedup against depth: measured points with intervals, the cost model as lines."""
    values = [value for dot in curves.dots for value in (dot.low, dot.high)]
    values += [value for line in curves.model.values() for _, value in line]
    scale = Scale(range(1, curves.deepest_known + 1), min([1.0, *values]), max([1.0, *values]))
    marks = [
        {
            "x": scale.x(dot.at),
            "y": scale.y(dot.speedup),
            "ends": [scale.y(dot.low), scale.y(dot.high)],
            "tick": None,
            "kind": "chain" if dot.chain else "tree",
            "title": f"{dot.tree}: {with_interval(dot.speedup, (dot.low, dot.high), unit='x')}",
        }
        for dot in curves.dots
    ]
    lines = [
        {"kind": kind, "points": " ".join(f"{scale.x(depth):.1f},{scale.y(value):.1f}" for depth, value in line)}
        for kind, line in curves.model.items()
        if len(line) > 1
    ]
    return scale.frame("x") | {"marks": marks, "lines": lines, "level": scale.y(1.0)}


def latency_chart(curves: Curves) -> Results:
    """The time between tokens against depth: median, 95th and 99th percentile; plain decoding at depth 0."""
    settings = [("plain decoding", 0.0, "faded", curves.plain_ms)]
    settings += [(dot.tree, dot.at, "chain" if dot.chain else "tree", dot.token_ms) for dot in curves.dots]
    scale = Scale(range(curves.deepest + 1), 0.0, max(spread["p99"] for _, _, _, spread in settings))
    marks = [
        {
            "x": scale.x(at),
            "y": scale.y(spread["p50"]),
            "ends": [scale.y(spread["p50"]), scale.y(spread["p99"])],
            "tick": scale.y(spread["p95"]),
            "kind": kind,
            "title": f"{name}: median {number(spread['p50'])} ms, 95% within {number(spread['p95'])} ms, "
            f"99% within {number(spread['p99'])} ms",
        }
        for name, at, kind, spread in settings
    ]
    return scale.frame(" ms") | {"marks": marks, "lines": [], "level": scale.y(curves.plain_ms["p50"])}


class Scale:
    """From depths and values to the SVG's units; y runs down."""

    def __init__(self, depths: range, low: float, high: float) -> None:
        self.depths = depths
        self.ticks = nice_ticks(low, high)
        self.low, self.high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def x(self, depth: float) -> float:
        return WIDTH * (depth - self.depths[0] + 0.5) / len(self.depths)

    def y(self, value: float) -> float:
        return HEIGHT * (self.high - value) / (self.high - self.low)

    def frame(self, unit: str) -> Results:
        """Axes: both sides' ticks with their labels."""
        digits = max(0, -math.floor(math.log10(self.ticks[1] - self.ticks[0]) + 1e-9))
        return {
            "width": WIDTH,
            "height": HEIGHT,
            "x_ticks": [(self.x(depth), str(depth) if depth else "plain") for depth in self.depths],
            "y_ticks": [(self.y(value), f"{number(value, digits)}{unit}") for value in self.ticks],
        }


def nice_ticks(low: float, high: float) -> list[float]:
    """Round values, evenly spaced, that span low to high in about MOST_STEPS."""
    high = max(high, low + 1e-3)
    span = high - low
    size = 10.0 ** math.floor(math.log10(span / MOST_STEPS))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if span / (size * factor) <= MOST_STEPS)
    first = math.floor(low / step + 1e-9)
    return [step * n for n in range(first, math.ceil(high / step - 1e-9) + 1)]


def kinds(curves: Curves) -> Sequence[str]:
    """Which of `chain` and `tree` are there to be explained."""
    return [kind for kind, chain in (("chain", True), ("tree", False)) if any(d.chain == chain for d in curves.dots)]
