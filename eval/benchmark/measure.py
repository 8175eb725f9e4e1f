"""Decode the same prompts plainly and with drafts, timed in turns.

Prompts that are decoded together form a unit. For each unit every contender (plain decoding, and each head with each
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
"""Called whenever one contender has decoded one unit, with the number of its prompts."""


@dataclass(frozen=True)
class Entry:
    """A head and the tree it drafts: what enters a race beside plain decoding."""

    head: Drafter
    shape: TreeShape
    rule: str = "match"
    """Of `eval.runtime.rules.RULES`."""
    adaptive: bool = False
    """Whether drafts are shortened, or left out, while that is faster."""
    strict: bool = False
    """Whether trees, too, repeat plain decoding bit for bit in narrow numbers on a GPU."""


@dataclass(frozen=True)
class Lap:
    """One unit, decoded once."""

    seconds: float
    """Prefill left out."""
    rounds: int
    """Of the whole batch."""
    token_seconds: list[float]
    """`metrics.token_seconds` of all its outputs."""
    rungs: Counter[str]
    """Rounds by their draft, where it is adaptive."""


@dataclass
class Contender:
    """One way of decoding, and what it gave."""

    engine: Engine
    outputs: list[dict[int, Output]] = field(default_factory=list)
    """By repeat: prompt index -> output."""
    laps: list[dict[int, Lap]] = field(default_factory=list)
    """By repeat: unit index -> lap."""

    @property
    def shape(self) -> TreeShape:
        """What it drafts."""
        return self.engine.shape

    def run(self, unit: int, indices: Sequence[int], requests: Sequence[Request], repeat: int) -> None:
        """Decode one unit and keep what it gave."""
        if len(self.outputs) == repeat:
            self.outputs.append({})
            self.laps.append({})
        outputs = self.engine.generate([requests[i] for i in indices])
        self.outputs[repeat].update(zip(indices, outputs, strict=True))
        timings = self.engine.timings
        by_token = [
            seconds
            for output in outputs
            for seconds in token_seconds(output.emitted(), timings.round_seconds[output.first_round :][: output.rounds])
        ]
        self.laps[repeat][unit] = Lap(timings.decode_seconds, timings.rounds, by_token, timings.rungs)

    def in_law(self, race: "Race") -> bool:
        """Whether its texts are other draws of the target's law than plain decoding's."""
        return self.engine.rule != "match" and race.requests[0].sampling.temperature > 0

    def laps_of(self, units: Sequence[int]) -> list[Lap]:
        """The laps of some units, all repeats together."""
        return [laps[unit] for unit in units for laps in self.laps]

    def unit_seconds(self, unit: int) -> float:
        """Decode seconds of one unit, all repeats together."""
        return sum(lap.seconds for lap in self.laps_of([unit]))


@dataclass
class Race:
    """All contenders over all prompts at one way of sampling."""

    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    units: list[list[int]]
    plain: Contender
    drafting: list[Contender]
    breakdowns: list[dict[str, float]] = field(default_factory=list)
    """For each of `drafting`: seconds of one round by phase, and under `plain` those of a plain step in the same
    minute."""

    def tokens(self, unit: int, contender: Contender | None = None) -> int:
        """Tokens that decoding (not prefill) made in one unit, all repeats together; plain decoding's by default, which
        are every contender's unless it is exact in law only."""
        outputs = (contender or self.plain).outputs
        return len(outputs) * sum(len(outputs[0][i].tokens) - 1 for i in self.units[unit])


def race(
    target: FrozenTarget,
    entries: Sequence[Entry],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    batch_size: int,
    repeats: int,
    on_unit: OnUnit = lambda count: None,
) -> Race:
    """Decode `prompts` plainly and with every entry, `repeats` times in turns. Prompt i samples with seed
    `sampling.seed` + i."""
    result = line_up(target, entries, prompts, sampling, max_new_tokens=max_new_tokens, batch_size=batch_size)
    contenders = [result.plain, *result.drafting]
    for repeat in range(repeats):
        for unit, indices in enumerate(result.units):
            first = (repeat + unit) % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                contender.run(unit, indices, result.requests, repeat)
                on_unit(len(indices))
    result.breakdowns = profile(result)
    return result


def line_up(
    target: FrozenTarget,
    entries: Sequence[Entry],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    batch_size: int,
) -> Race:
    """A race about to begin: every contender warm."""
    longest = max(len(prompt.ids) for prompt in prompts)
    room = longest + max_new_tokens + max(entry.shape.nodes for entry in entries)
    requests = [
        Request(list(prompt.ids), max_new_tokens, replace(sampling, seed=sampling.seed + i))
        for i, prompt in enumerate(prompts)
    ]
    size: dict[str, Any] = {"batch_size": batch_size, "max_length": room}
    plain = Contender(Engine(target, **size))
    drafting = [
        Contender(Engine(target, e.head, shape=e.shape, rule=e.rule, adaptive=e.adaptive, strict=e.strict, **size))
        for e in entries
    ]
    result = Race(prompts, requests, split_units(prompts, batch_size), plain, drafting)
    warm = min(max_new_tokens, WARM_UP_TOKENS)
    for contender in (plain, *drafting):
        contender.engine.generate([replace(requests[i], max_new_tokens=warm, ignore_eos=True) for i in result.units[0]])
    return result


def split_units(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Indices of the prompts that are decoded together: neighbours of one suite and category, at most a batch."""
    units: list[list[int]] = []
    for _, group in groupby(range(len(prompts)), key=lambda i: (prompts[i].suite, prompts[i].category)):
        indices = list(group)
        units += [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    return units


def profile(race: Race, num_prompts: int = PROFILED_PROMPTS) -> list[dict[str, float]]:
    """For each drafting contender: seconds of one round by phase, over the first prompts that have any.

    They are decoded once more, and plainly too, for the seconds of a plain step in the same minute.
    """
    contenders = [race.plain, *race.drafting]
    seconds = [dict.fromkeys((*PHASES, "whole"), 0.0) for _ in contenders]
    rounds = [0] * len(contenders)
    profiled = 0
    for indices in race.units:
        for n, contender in enumerate(contenders):
            contender.engine.profile = n > 0
            outputs = contender.engine.generate([race.requests[i] for i in indices])
            contender.engine.profile = False
            timings = contender.engine.timings
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
    """What the metrics need of one output."""
    return Trace(len(output.tokens) - 1, tuple(output.accepted), tuple(output.reached))


def check_decoded(outputs: Iterable[Output], suite: str) -> None:
    """UserError where no output is longer than the one token that the prefill gives."""
    if all(output.rounds == 0 for output in outputs):
        raise UserError(
            f"{suite}: every output ended with its first token, which the prefill gives: there is nothing to draft; "
            "use other prompts, or allow more new tokens"
        )
