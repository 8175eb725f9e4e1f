"""Measurement of plain decoding and drafts on the same prompts, in turns.

Prompts that are decoded together form a unit. Every variant (plain decoding, and each head with each draft tree)
decodes each unit in turn. The variant that goes first rotates, so that a machine that slows down affects all variants
alike. Prefill is not timed.

A turn is one unit decoded by all variants in one repeat. The slowest tenth of turns is left out of all times, and its
tokens with it, on both sides of a comparison alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, product
from statistics import median
from typing import Any

import torch

from eval.core.progress import Progress
from eval.data.prompts import Prompt, prompts_hash
from eval.measure.machine import busy_cores
from eval.measure.roofline import phase_seconds
from eval.records.journal import Journal
from eval.records.measure_settings import BenchSettings
from eval.records.metrics import token_seconds
from eval.runtime.engine import Engine, EngineOptions, Output, Request, Timings
from eval.runtime.round import read_prompts
from heads.core.contract import Drafter
from heads.core.errors import UserError
from heads.core.tree import TreeShape
from heads.kernels.slots import round_up
from heads.targets.frozen_target import FrozenTarget

WARM_UP_TOKENS = 24
MAX_NAMES = 22
"""Number of letters up to which a line of progress names its drafts: it stays under 100 letters."""
TURNS_PER_SLOW_ONE = 10
"""Of so many turns the slowest is left out."""

Draft = tuple[Drafter, TreeShape]
"""Pair of a head and the tree that it drafts, to be compared with plain decoding."""
Turn = tuple[int, int]
"""Repeat and unit."""


@dataclass
class Variant:
    """One way of decoding, with its outputs and times."""

    engine: Engine
    outputs: list[dict[int, Output]] = field(default_factory=list)
    """Outputs by repeat and prompt index."""
    timings: list[dict[int, Timings]] = field(default_factory=list)
    """Timings by repeat and unit index."""

    @property
    def shape(self) -> TreeShape:
        return self.engine.options.shape

    def run(self, unit: int, indices: Sequence[int], requests: Sequence[Request], repeat: int) -> None:
        outputs = self.engine.generate([requests[i] for i in indices])
        self.take(unit, indices, repeat, outputs, self.engine.timings)

    def take(self, unit: int, indices: Sequence[int], repeat: int, outputs: Sequence[Output], timings: Timings) -> None:
        if len(self.outputs) == repeat:
            self.outputs.append({})
            self.timings.append({})
        self.outputs[repeat].update(zip(indices, outputs, strict=True))
        self.timings[repeat][unit] = timings

    def turn(self, repeat: int, unit: int, indices: Sequence[int]) -> dict[str, object]:
        """Return the record of a turn."""
        outputs = [asdict(self.outputs[repeat][i]) for i in indices]
        return {"outputs": outputs, "timings": asdict(self.timings[repeat][unit])}

    def timings_of(self, turns: Sequence[Turn]) -> list[Timings]:
        return [self.timings[repeat][unit] for repeat, unit in turns]

    def round_seconds(self, turns: Sequence[Turn]) -> list[float]:
        return [seconds for timings in self.timings_of(turns) for seconds in timings.round_seconds]


@dataclass
class Comparison:
    """All variants on all prompts with the same sampling settings."""

    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    units: list[list[int]]
    plain: Variant
    drafting: list[Variant]
    breakdowns: list[dict[str, float]] = field(default_factory=list)
    """Seconds of one round by phase for each of `drafting`; under `plain`, seconds of a plain step measured in the same
    minute."""
    others: float | None = None
    """Cores that other processes used when it began, if they left too few."""

    @property
    def in_distribution(self) -> bool:
        """True if outputs are sampled under a rule other than `match`: they then differ from plain decoding's, though
        they have the target's distribution."""
        sampled = self.requests[0].sampling.temperature > 0
        return sampled and any(variant.engine.options.rule != "match" for variant in self.drafting)

    def turns(self, units: Sequence[int]) -> list[Turn]:
        return [(repeat, unit) for repeat in range(len(self.plain.outputs)) for unit in units]

    def timed_turns(self, units: Sequence[int]) -> list[Turn]:
        """Return the turns of some units whose times count: all but the slowest tenth.

        A turn is slow if its rounds took long, whatever their number: its seconds per round are divided by those of
        the median turn, and summed over all variants.
        """
        turns = self.turns(units)
        paces = [relative_pace(variant.timings_of(turns)) for variant in (self.plain, *self.drafting)]
        slowness = [sum(of_variants) for of_variants in zip(*paces, strict=True)]
        slowest = sorted(range(len(turns)), key=lambda n: -slowness[n])[: len(turns) // TURNS_PER_SLOW_ONE]
        return [turn for n, turn in enumerate(turns) if n not in slowest]

    def rate(self, variant: Variant, turns: Sequence[Turn]) -> tuple[list[int], list[float]]:
        """Return the tokens that rounds (not prefill) produced in some turns, and their seconds, by unit."""
        tokens = [0] * len(self.units)
        seconds = [0.0] * len(self.units)
        for repeat, unit in turns:
            tokens[unit] += sum(variant.outputs[repeat][i].decoded for i in self.units[unit])
            seconds[unit] += variant.timings[repeat][unit].decode_seconds
        return tokens, seconds

    def token_seconds(self, units: Sequence[int], variant: Variant) -> list[float]:
        """Return the seconds between tokens in some units, in all repeats."""
        return [
            seconds
            for unit in units
            for outputs, timings in zip(variant.outputs, variant.timings, strict=True)
            for i in self.units[unit]
            for seconds in token_seconds(outputs[i], timings[unit].round_seconds)
        ]


def compare(
    target: FrozenTarget,
    drafts: Sequence[Draft],
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
    where: str = "",
    *,
    phases: bool = True,
    journal: Journal | None = None,
) -> Comparison:
    """Decode `prompts` plainly and with every draft in turns, `settings.repeats` times. `where`: more words for the
    lines of progress. `phases`: also measure the phases of a round, and look whether the machine is free. `journal`:
    keeps each turn, and has those that an interrupted measurement made."""
    names = ", ".join(dict.fromkeys(str(shape) for _, shape in drafts))
    if len(names) > MAX_NAMES:
        names = f"{len(drafts)} drafts"
    what = f"measuring {names} {'greedy' if temperature == 0 else f'at T = {temperature:g}'}{where}"
    journal = Journal() if journal is None else journal
    shapes = [str(shape) for _, shape in drafts]
    part = journal.part(target.fingerprint, prompts_hash(prompts), shapes, temperature, settings.model_dump())
    result = line_up(target, drafts, prompts, temperature, settings)
    variants = [result.plain, *result.drafting]
    turns = list(product(range(settings.repeats), range(len(result.units))))
    made = {turn: turn_of(journal.get(part, *turn)) for turn in turns}
    done = len(variants) * sum(len(result.units[unit]) for (_, unit), each in made.items() if each)
    total = settings.repeats * len(variants) * len(prompts)
    result.others = journal.get(part, "others")
    if phases and done < total and (used := busy_cores(target.device)) is not None:
        result.others = used
        journal.add(used, part, "others")
    with Progress(f"{what}: output", total, done=done, cold=True) as progress:
        if done < total:
            warm_up(result)
        for repeat, unit in turns:
            indices = result.units[unit]
            if each := made[repeat, unit]:
                for variant, (outputs, timings) in zip(variants, each, strict=True):
                    variant.take(unit, indices, repeat, outputs, timings)
                continue
            first = (repeat + unit) % len(variants)
            for variant in variants[first:] + variants[:first]:
                variant.run(unit, indices, result.requests, repeat)
                progress.advance(len(indices))
            journal.add([variant.turn(repeat, unit, indices) for variant in variants], part, repeat, unit)
    if phases:
        with Progress(f"{what}: phases of a round", announced=True):
            if (breakdowns := journal.get(part, "phases")) is None:
                breakdowns = round_phases(result)
                journal.add(breakdowns, part, "phases")
            result.breakdowns = breakdowns
    return result


def turn_of(record: list[dict[str, Any]] | None) -> list[tuple[list[Output], Timings]]:
    """Return the outputs and the times of each variant in a recorded turn, or nothing without a record."""
    turn = []
    for variant in record or ():
        outputs = [Output(**output) for output in variant["outputs"]]
        turn.append((outputs, Timings(**variant["timings"])))
    return turn


def line_up(
    target: FrozenTarget,
    drafts: Sequence[Draft],
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
) -> Comparison:
    """Return a comparison without measurements. Prompt i has seed `settings.seed` + i."""
    longest = max(len(prompt.ids) for prompt in prompts)
    nodes = max(head.longest(shape, settings.batch_size).nodes for head, shape in drafts)
    room = longest + settings.max_new_tokens + nodes
    sampling = settings.sampling_at(temperature)
    requests = [
        Request(
            list(prompt.ids),
            settings.max_new_tokens,
            sampling.with_seed(sampling.seed + i),
            ignore_eos=not settings.timing,
        )
        for i, prompt in enumerate(prompts)
    ]
    plain = Variant(Engine(target, None, EngineOptions(batch_size=settings.batch_size, max_length=room)))
    drafting = [Variant(Engine(target, head, engine_options(settings, shape, room))) for head, shape in drafts]
    return Comparison(prompts, requests, split_units(prompts, settings.batch_size), plain, drafting)


def warm_up(comparison: Comparison) -> None:
    requests = [comparison.requests[i] for i in comparison.units[0]]
    warm = [replace(r, max_new_tokens=min(r.max_new_tokens, WARM_UP_TOKENS), ignore_eos=True) for r in requests]
    for variant in (comparison.plain, *comparison.drafting):
        variant.engine.generate(warm)


def engine_options(settings: BenchSettings, shape: TreeShape, max_length: int) -> EngineOptions:
    return EngineOptions(shape=shape, rule=settings.rule, batch_size=settings.batch_size, max_length=max_length)


def relative_pace(timings: Sequence[Timings]) -> list[float]:
    """Return the seconds per round, relative to the median; 0 without rounds."""
    paces = [timing.decode_seconds / timing.rounds if timing.rounds else 0.0 for timing in timings]
    middle = median([pace for pace in paces if pace] or [1.0])
    return [pace / middle for pace in paces]


def split_units(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Return the indices of the prompts that are decoded together: consecutive prompts of one suite and category, at
    most `batch_size`."""
    units: list[list[int]] = []
    for _, group in groupby(range(len(prompts)), key=lambda i: (prompts[i].suite, prompts[i].category)):
        indices = list(group)
        units += [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    return units


def units_by_suite(prompts: Sequence[Prompt], units: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Return the units of each suite, and of each named category as `suite/category`."""
    groups: dict[str, list[int]] = {}
    for unit, indices in enumerate(units):
        prompt = prompts[indices[0]]
        groups.setdefault(prompt.suite, []).append(unit)
        if prompt.category != prompt.suite:
            groups.setdefault(f"{prompt.suite}/{prompt.category}", []).append(unit)
    return groups


@torch.inference_mode()
def round_phases(comparison: Comparison) -> list[dict[str, float]]:
    """Return the seconds of one round by phase for each drafting variant, after the first prompts; under `plain`, those
    of a plain step. On a GPU they are the times of the device alone."""
    engines = [variant.engine for variant in (comparison.plain, *comparison.drafting)]
    requests = dict(enumerate(comparison.requests[i] for i in comparison.units[0]))
    longest = max(len(request.prompt) for request in requests.values())
    phases = []
    for engine in engines:
        engine.decoder.state.done.fill_(True)
        read_prompts(engine.decoder, requests)
        phases.append(phase_seconds(engine, min(round_up(longest + engine.nodes), engine.decoder.target.spec.capacity)))
    plain = sum(phases[0].values())
    return [of_draft | {"plain": plain} for of_draft in phases[1:]]


def check_decoded(outputs: Iterable[Output], suite: str) -> None:
    """Raise UserError if no output is longer than the one token from the prefill."""
    if all(output.rounds == 0 for output in outputs):
        raise UserError(
            f"{suite}: every output ended with its first token, which the prefill gives: there is nothing to draft; "
            "use other prompts, or allow more new tokens"
        )
