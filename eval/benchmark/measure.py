"""Decode the same prompts plainly and with drafts, timed in turns.

Prompts that are decoded together form a unit. For each unit every variant (plain decoding, and each head with each
draft tree) decodes it in turn, the first place rotating, so that a machine that slows down slows all of them. Prefill
is timed apart.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from eval.benchmark.metrics import Trace, token_seconds
from eval.benchmark.prompts import Prompt
from eval.runtime.engine import PHASES, Engine, Output, Request
from eval.runtime.sampling import Sampling
from heads.base import Drafter
from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from heads.tree import TreeShape

WARM_UP_TOKENS = 24
PROFILED_PROMPTS = 4

OnUnit = Callable[[int], None]
"""Called whenever one variant has decoded one unit, with the number of its prompts."""


@dataclass(frozen=True)
class VariantSpec:
    """A head and the tree it drafts: what enters a comparison beside plain decoding."""

    head: Drafter
    shape: TreeShape
    rule: str = "match"
    """Name of the acceptance rule, in `eval.runtime.rules.RULES`."""
    adaptive: bool = False
    """Shorten drafts, or leave them out, while that is faster."""
    strict: bool = False
    """Make trees, too, repeat plain decoding bit for bit in narrow numbers on a GPU."""


@dataclass(frozen=True)
class Timing:
    """One unit, decoded once."""

    seconds: float
    """Seconds without the prefill."""
    rounds: int
    """Number of rounds of the whole batch."""
    token_seconds: list[float]
    """`metrics.token_seconds` of all its outputs."""
    candidates: Counter[str]
    """Rounds by their draft, where it is adaptive."""


@dataclass
class Variant:
    """One way of decoding, and what it gave."""

    engine: Engine
    outputs: list[dict[int, Output]] = field(default_factory=list)
    """Outputs by repeat and prompt index."""
    timings: list[dict[int, Timing]] = field(default_factory=list)
    """Timings by repeat and unit index."""

    @property
    def shape(self) -> TreeShape:
        """Shape of its drafts."""
        return self.engine.shape

    def run(self, unit: int, indices: Sequence[int], requests: Sequence[Request], repeat: int) -> None:
        """Decode one unit and keep what it gave."""
        if len(self.outputs) == repeat:
            self.outputs.append({})
            self.timings.append({})
        outputs = self.engine.generate([requests[i] for i in indices])
        self.outputs[repeat].update(zip(indices, outputs, strict=True))
        timings = self.engine.timings
        by_token = [
            seconds
            for output in outputs
            for seconds in token_seconds(output.emitted(), timings.round_seconds[output.first_round :][: output.rounds])
        ]
        self.timings[repeat][unit] = Timing(timings.decode_seconds, timings.rounds, by_token, timings.candidates)

    def in_distribution(self, comparison: "Comparison") -> bool:
        """True if its texts are other draws of the target's distribution than plain decoding's."""
        return self.engine.rule != "match" and comparison.requests[0].sampling.temperature > 0

    def timings_of(self, units: Sequence[int]) -> list[Timing]:
        """The timings of some units, all repeats together."""
        return [timings[unit] for unit in units for timings in self.timings]

    def unit_seconds(self, unit: int) -> float:
        """Decode seconds of one unit, all repeats together."""
        return sum(timing.seconds for timing in self.timings_of([unit]))


@dataclass
class Comparison:
    """All variants over all prompts at one way of sampling."""

    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    units: list[list[int]]
    plain: Variant
    drafting: list[Variant]
    breakdowns: list[dict[str, float]] = field(default_factory=list)
    """For each of `drafting`: seconds of one round by phase, and under `plain` those of a plain step in the same
    minute."""

    def tokens(self, unit: int, variant: Variant | None = None) -> int:
        """Tokens that decoding (not prefill) made in one unit, all repeats together; plain decoding's by default, which
        are every variant's unless it is exact in distribution only."""
        outputs = (variant or self.plain).outputs
        return len(outputs) * sum(len(outputs[0][i].tokens) - 1 for i in self.units[unit])


def compare(
    target: FrozenTarget,
    entries: Sequence[VariantSpec],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    batch_size: int,
    repeats: int,
    on_unit: OnUnit = lambda count: None,
) -> Comparison:
    """Decode `prompts` plainly and with every entry, `repeats` times in turns. Prompt i samples with seed
    `sampling.seed` + i."""
    result = line_up(target, entries, prompts, sampling, max_new_tokens=max_new_tokens, batch_size=batch_size)
    variants = [result.plain, *result.drafting]
    for repeat in range(repeats):
        for unit, indices in enumerate(result.units):
            first = (repeat + unit) % len(variants)
            for variant in variants[first:] + variants[:first]:
                variant.run(unit, indices, result.requests, repeat)
                on_unit(len(indices))
    result.breakdowns = profile(result)
    return result


def line_up(
    target: FrozenTarget,
    entries: Sequence[VariantSpec],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    batch_size: int,
) -> Comparison:
    """A comparison about to begin: every variant warm."""
    longest = max(len(prompt.ids) for prompt in prompts)
    room = longest + max_new_tokens + max(spec.shape.nodes for spec in entries)
    requests = [
        Request(list(prompt.ids), max_new_tokens, replace(sampling, seed=sampling.seed + i))
        for i, prompt in enumerate(prompts)
    ]
    size: dict[str, Any] = {"batch_size": batch_size, "max_length": room}
    plain = Variant(Engine(target, **size))
    drafting = [
        Variant(Engine(target, e.head, shape=e.shape, rule=e.rule, adaptive=e.adaptive, strict=e.strict, **size))
        for e in entries
    ]
    result = Comparison(prompts, requests, split_units(prompts, batch_size), plain, drafting)
    warm = min(max_new_tokens, WARM_UP_TOKENS)
    for variant in (plain, *drafting):
        variant.engine.generate([replace(requests[i], max_new_tokens=warm, ignore_eos=True) for i in result.units[0]])
    return result


def split_units(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Indices of the prompts that are decoded together: neighbours of one suite and category, at most a batch."""
    units: list[list[int]] = []
    for _, group in groupby(range(len(prompts)), key=lambda i: (prompts[i].suite, prompts[i].category)):
        indices = list(group)
        units += [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    return units


def profile(comparison: Comparison, num_prompts: int = PROFILED_PROMPTS) -> list[dict[str, float]]:
    """For each drafting variant: seconds of one round by phase, over the first prompts that have any.

    They are decoded once more, and plainly too, for the seconds of a plain step in the same minute.
    """
    variants = [comparison.plain, *comparison.drafting]
    seconds = [dict.fromkeys((*PHASES, "whole"), 0.0) for _ in variants]
    rounds = [0] * len(variants)
    profiled = 0
    for indices in comparison.units:
        for n, variant in enumerate(variants):
            variant.engine.profile = n > 0
            outputs = variant.engine.generate([comparison.requests[i] for i in indices])
            variant.engine.profile = False
            timings = variant.engine.timings
            rounds[n] += timings.rounds
            for phase, spent in (*timings.breakdown.items(), ("whole", timings.decode_seconds)):
                seconds[n][phase] += spent
        profiled += sum(output.rounds > 0 for output in outputs)
        if profiled >= num_prompts:
            break
    plain = seconds[0]["whole"] / max(rounds[0], 1)
    return [
        {phase: spent[phase] / max(count, 1) for phase in PHASES} | {"plain": plain}
        for spent, count in zip(seconds[1:], rounds[1:], strict=True)
    ]


def trace(output: Output) -> Trace:
    """Return the trace of one output for the metrics."""
    return Trace(len(output.tokens) - 1, tuple(output.accepted), tuple(output.reached))


def check_decoded(outputs: Iterable[Output], suite: str) -> None:
    """Raise UserError if no output is longer than the one token of the prefill."""
    if all(output.rounds == 0 for output in outputs):
        raise UserError(
            f"{suite}: every output ended with its first token, which the prefill gives: there is nothing to draft; "
            "use other prompts, or allow more new tokens"
        )
