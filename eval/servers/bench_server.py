"""Measurement of a running server, with anybody's head, as the contents of results.json.

Prompts are sent in groups, and vLLM's counters are read between groups. At concurrency 1 a group is one prompt; above,
WAVES prompts for each request in flight, so that the end of a group is short. Intervals are bootstraps over prompts if
the server says each answer's rounds, else over groups, and over groups for speeds.
"""

import argparse
import asyncio
import math
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from eval.core.progress import Progress
from eval.data.prompts import HELD_OUT_SUITE, Prompt, prompts_hash
from eval.data.template_arguments import with_arguments
from eval.measure.compare import split_units, units_by_suite
from eval.measure.machine import dtype_options, machine
from eval.measure.model_facts import head_facts, target_facts
from eval.measure.open_models import fitting_head, load_suites, open_target, open_target_of, prompt_room, say_defaults
from eval.records import metrics
from eval.records.figures_schema import (
    Baseline,
    Divergence,
    Exact,
    Measurement,
    Percentiles,
    Speculative,
    Speedup,
    Tau,
)
from eval.records.head_schema import Head, HeadConfig
from eval.records.journal import Journal
from eval.records.measure_settings import BenchSettings
from eval.records.schema import Device, RecordedSettings, Results, Served, Target
from eval.runtime.sampling_params import Sampling
from eval.servers.engine_client import DRAFTED, DRAFTS, GENERATED, Answer, EngineServer, RoundCounts, count_rounds
from eval.servers.served_texts import Draws, compare_answers, compare_with_target, pooled
from heads.targets.hub import is_here
from heads.targets.target_files import load_tokenizer

WAVES = 4
"""Prompts of a group for each request in flight, at a concurrency above 1."""


@dataclass
class Group:
    """Prompts between two readings of the counters, with their answers by repeat."""

    indices: list[int]
    answers: list[list[Answer]] = field(default_factory=list)
    plain: list[list[Answer]] = field(default_factory=list)
    rounds: list[RoundCounts] = field(default_factory=list)
    """By repeat: those of each answer, or those of all together."""

    def last(self, rounds: Sequence[RoundCounts]) -> dict[str, list[dict[str, object]]]:
        """Return the record of the last repeat. `rounds`: those of it."""
        return {
            "answers": [asdict(answer) for answer in self.answers[-1]],
            "plain": [asdict(answer) for answer in self.plain[-1]] if self.plain else [],
            "rounds": [asdict(counts) for counts in rounds],
        }

    def take(self, record: dict[str, list[dict[str, Any]]]) -> None:
        """Add a repeat from its record."""
        self.answers.append([Answer(**answer) for answer in record["answers"]])
        self.plain += [[Answer(**answer) for answer in record["plain"]]] * bool(record["plain"])
        self.rounds += [RoundCounts(**counts) for counts in record["rounds"]]

    def units(self) -> list[tuple[int, int]]:
        """Return the tokens and the rounds after the first token of each prompt, or of all together."""
        step = len(self.rounds) // len(self.answers)
        numbers = [sum(part.number for part in self.rounds[n::step]) for n in range(step)]
        repeats = [[answer.decoded for answer in answers] for answers in self.answers]
        tokens = [sum(of_prompt) for of_prompt in zip(*repeats, strict=True)]
        return list(zip(tokens if step == len(self.indices) else [sum(tokens)], numbers, strict=True))


def bench_server(options: argparse.Namespace, settings: BenchSettings, journal: Journal) -> Results:
    """Measure the server `--server`, beside `--plain-server` if there is one. The target is loaded if a head or
    `--target` names it; else only its tokenizer, if the folder that the server names is here."""
    with asyncio.Runner() as runner:
        server, plain = runner.run(open_servers(options))
        try:
            return measure_server(options, settings, server, plain, runner.run, journal)
        finally:
            for each in filter(None, (server, plain)):
                runner.run(each.client.aclose())


async def open_servers(options: argparse.Namespace) -> tuple[EngineServer, EngineServer | None]:
    server = await EngineServer.open(options.server)
    server.need_draft()
    if not options.plain_server:
        return server, None
    plain = await EngineServer.open(options.plain_server)
    if plain.depth:
        raise plain.error("--plain-server: it speculates; start it without a draft")
    if plain.root != server.root:
        raise plain.error(f"serves {plain.root}, where {server.url} serves {server.root}; serve the same target")
    return server, plain


def measure_server(
    options: argparse.Namespace,
    settings: BenchSettings,
    server: EngineServer,
    plain: EngineServer | None,
    run: Callable[[Coroutine[object, object, object]], Any],
    journal: Journal,
) -> Results:
    """Return the contents of results.json. `run` runs a coroutine in the event loop of the clients."""
    (head,) = options.heads or [None]
    target = tokenizer = drafter = None
    if head or options.target:
        target, tokenizer = open_target_of(head, options) if head else open_target(options.target, options)
        drafter = fitting_head(head, target) if head else None
        settings = settings.as_served(target)
    else:
        if is_here(server.root) and not os.path.isfile(server.root):  # a GGUF file
            tokenizer = load_tokenizer(
                server.root,
                trust_remote_code=options.trust_remote_code,
                fix_mistral_regex=options.fix_mistral_regex,
            )
            if options.template is None:
                say_defaults(server.root, tokenizer)
            tokenizer = with_arguments(tokenizer, options.template or {})
        elif HELD_OUT_SUITE in settings.prompts:
            raise server.error(
                f"{HELD_OUT_SUITE} is cut by tokens, and the tokenizer of {server.root} is not here; name the target "
                "with --target, or other --prompts"
            )
        if settings.sampling:
            raise server.error(f"--sampling {settings.sampling}: is read from the target here; name it with --target")
    settings = settings.model_copy(update={"trees": (f"chain:{server.depth}",)})

    def answer(prompts: Sequence[Prompt]) -> list[Sequence[int] | str]:
        answers = (run(server.ask(prompt, Sampling(), settings.max_new_tokens)) for prompt in prompts)
        return [answer.text if tokenizer is None else answer.tokens or answer.text for answer in answers]

    room = prompt_room(server.root, server.context_length, settings.max_new_tokens, server.depth + 1)
    vocab_size = target.vocab_size if target else None
    prompts = load_suites(settings, tokenizer, min(settings.max_prompt_tokens or room, room), answer, vocab_size)
    if target:
        run(server.check_target(target, prompts[0], settings.min_p))
    measurements: list[Measurement] = []
    for temperature in settings.temperatures:
        for _, concurrency in settings.points:
            at = settings.model_copy(update={"batch_size": concurrency})
            stop_ids = target.eos_token_ids if target else ()
            groups = run(ask_all(server, plain, stop_ids, prompts, at, temperature, journal))
            differences = None
            answers = {i: answer for group in groups for i, answer in zip(group.indices, group.answers[0], strict=True)}
            if target and tokenizer and temperature == 0 and all(answer.tokens for answer in answers.values()):
                texts = [answers[i].tokens for i in range(len(prompts))]
                with Progress(f"decoding {len(prompts)} prompts here, to compare the texts", announced=True):
                    differences = compare_with_target(target, tokenizer, prompts, texts, settings)
            draws = None
            if target and temperature > 0 and all(answer.tokens for answer in answers.values()):
                with Progress(f"comparing {len(prompts)} sampled texts with the target's distribution", announced=True):
                    draws = compare_answers(server, target, prompts, answers, settings.sampling_at(temperature))
                if draws.excess() > 1:
                    journal.clear()
                    raise server.error(
                        f"its sampled texts are not the target's at T = {temperature:g}: {draws.record()}; no figure "
                        "is stated"
                    )
            take = partial(served_figures, server.depth, prompts, temperature, differences, draws)
            measurement = take(groups)
            if settings.batch_sizes:
                measurement.batch_size = concurrency
            if not measurements:
                units = units_by_suite(prompts, [group.indices for group in groups])
                measurement.suites = {name: take([groups[n] for n in indices]) for name, indices in units.items()}
            measurements.append(measurement)
    exact = pooled([m.exact for m in measurements])
    if exact.divergences:
        for m in measurements:
            for part in (m, *m.suites.values()):
                part.speedup = None
    facts = machine(torch.device("cpu"))
    facts["versions"] |= {server.engine.lower(): server.version}
    command = ["python", "eval/bench.py", *([head] if head else []), "--server", server.url]
    command += ["--plain-server", plain.url] if plain else []
    if target:
        command += ["--target", target.name, *dtype_options(target)]
    return Results(
        schema_version=1,
        target=target_facts(target) if target else Target(name=server.root),
        **{**facts, "device": Device(name=f"{server.name} at {server.url}")},
        dtype="its own dtype",
        server=Served(name=server.name, url=server.url, model=server.model, plain_url=plain.url if plain else None),
        settings=RecordedSettings(**settings.record(prompts)),
        command=[*command, *settings.options()[2:]],
        heads=[
            head_facts(drafter, head, target, measurements=measurements)
            if drafter and head
            else Head(kind="draft", path=server.url, sha256=None, parameters=0, aux_layer_ids=[], config=HeadConfig())
        ],
        exact=exact,
        measurements=measurements,
        samples=[],
    )


async def ask_all(
    server: EngineServer,
    plain: EngineServer | None,
    stop_ids: Sequence[int],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    temperature: float,
    journal: Journal,
) -> list[Group]:
    """Send all prompts, `settings.repeats` times, to the server and the plain one in turns. Answers in the journal are
    not asked for again."""
    concurrency, sampling = settings.batch_size, settings.sampling_at(temperature)
    size = concurrency if concurrency == 1 else WAVES * concurrency
    groups = [Group(indices) for indices in split_units(prompts, size)]
    mode = "greedily" if temperature == 0 else f"at T = {temperature:g}"
    total = settings.repeats * len(prompts) * (2 if plain else 1)
    slots = asyncio.Semaphore(concurrency)
    with Progress(f"asking {server.url} {mode}, {concurrency} in flight: answer", total) as progress:

        async def ask(server: EngineServer, i: int) -> Answer:
            async with slots:
                seeded = sampling.with_seed(sampling.seed + i)
                answer = await server.ask(prompts[i], seeded, settings.max_new_tokens, stop_ids)
            progress.advance()
            return answer

        async def ask_group(server: EngineServer, indices: Sequence[int]) -> list[Answer]:
            return await asyncio.gather(*(ask(server, i) for i in indices))

        counters = await server.counters() if server.engine in GENERATED else Counter()
        for each in filter(None, (plain, server)):
            warm = await each.ask(prompts[0], sampling, settings.max_new_tokens)  # not measured: a first answer is slow
        if is_counting := server.engine in GENERATED and not warm.rounds:
            counters = await server.counters_after(counters, [warm])
        servers = [(each.url, each.name, each.root, each.depth) for each in (server, plain) if each]
        part = journal.part(servers, prompts_hash(prompts), temperature, settings.model_dump())
        for repeat in range(settings.repeats):
            for n, group in enumerate(groups):
                if record := journal.get(part, repeat, n):
                    progress.advance(len(group.indices) * (2 if plain else 1))
                    group.take(record)
                    continue
                if plain and (repeat + n) % 2:
                    group.plain.append(await ask_group(plain, group.indices))
                answers = await ask_group(server, group.indices)
                group.answers.append(answers)
                if is_counting:
                    before, counters = counters, await server.counters_after(counters, answers)
                    accepted = [counters[str(k)] - before[str(k)] for k in range(server.depth)]
                    counts = count_rounds(counters[DRAFTS] - before[DRAFTS], accepted, answers)
                    counts.drafted = counters[DRAFTED] - before[DRAFTED] if DRAFTED in counters else None
                    rounds = [counts]
                else:
                    rounds = [server.rounds_of(answer) for answer in answers]
                group.rounds += rounds
                if plain and not (repeat + n) % 2:
                    group.plain.append(await ask_group(plain, group.indices))
                journal.add(group.last(rounds), part, repeat, n)
    if not any(answer.decoded for group in groups for answer in group.answers[0]):
        raise server.error("every answer ended with its first token; use other prompts, or allow more new tokens")
    return groups


def served_figures(
    depth: int,
    prompts: Sequence[Prompt],
    temperature: float,
    differences: Sequence[Divergence] | None,
    draws: Draws | None,
    groups: Sequence[Group],
) -> Measurement:
    """Return the figures of one setting over some groups, over all repeats. `differences`: those of all greedy texts
    from plain decoding here, or None if there was no comparison. `draws`: the comparison of all sampled texts."""
    parts = [part for group in groups for part in group.rounds]
    accepted = [sum(column) for column in zip(*(part.accepted for part in parts), strict=True)]
    tested = [sum(column) for column in zip(*(part.tested for part in parts), strict=True)]
    answers = [answer for group in groups for repeat in group.answers for answer in repeat]
    decoded, numbers = zip(*(unit for group in groups for unit in group.units()), strict=True)
    by_prompt = len(numbers) == sum(len(group.indices) for group in groups)
    each = [tokens / number for tokens, number in zip(decoded, numbers, strict=True) if number]
    known = [part.drafted for part in parts if part.drafted is not None]
    drafted, plain = rate([group.answers for group in groups]), rate([group.plain for group in groups])
    plainly = [answer for group in groups for repeat in group.plain for answer in repeat]
    is_timed = all(answer.is_timed for answer in (*answers, *plainly))
    measurement = Measurement(
        tree=f"chain:{depth}",
        depth=depth,
        nodes=depth + 1,
        temperature=temperature,
        rule="match" if temperature == 0 else "server",
        exact=compare_texts(groups, prompts, temperature, differences, draws),
        tau=Tau(
            mean=sum(decoded) / max(sum(numbers), 1),
            ci95=metrics.ratio_interval(decoded, numbers),
            per_request=fmean(each) if each and by_prompt else None,
        ),
        alpha=[n / rounds if rounds else None for n, rounds in zip(accepted, tested, strict=True)],
        accepted_histogram=[n - deeper for n, deeper in pairwise([sum(numbers), *accepted, 0])],
        loop_share=metrics.loop_share([answer.tokens for answer in answers]) if answers[0].tokens else None,
        tokens=sum(answer.count for answer in answers),
        undecoded=sum(answer.count == 1 for group in groups for answer in group.answers[0]),
        longest=max(
            len(prompts[i].ids) + answer.count
            for group in groups
            for repeat in group.answers
            for i, answer in zip(group.indices, repeat, strict=True)
        ),
        drafted=sum(known) / max(sum(numbers), 1) if known else None,
        first_token_ms=metrics.token_percentiles(  # of the first repeat: servers cache prompts
            [answer.pieces[0][0] - answer.sent for group in groups for answer in group.answers[0]]
        ),
        baseline=None,
        speculative=Speculative(hidden=True),
        speedup=None,
    )
    if not is_timed:
        measurement.first_token_ms = Percentiles()
        return measurement
    seconds_per_round = sum(drafted[1]) / max(sum(numbers), 1)
    measurement.speculative = Speculative(ms_per_round=1e3 * seconds_per_round, **speeds(answers, drafted))
    if groups[0].plain:
        measurement.baseline = Baseline(**speeds(plainly, plain))
        measurement.speedup = Speedup(
            measured=metrics.rate_ratio(drafted, plain),
            ci95=metrics.rate_ratio_interval(drafted, plain),
            predicted=math.nan,
            tokens=int(min(sum(drafted[0]), sum(plain[0]))),
        )
    return measurement


def rate(groups: Sequence[Sequence[Sequence[Answer]]]) -> metrics.Rate:
    """Return the tokens after each answer's first, and the seconds from the first token of a group to its last, by
    group."""
    tokens = [sum(answer.decoded for repeat in group for answer in repeat) for group in groups]
    seconds = [
        sum(max(a.pieces[-1][0] for a in repeat) - min(a.pieces[0][0] for a in repeat) for repeat in group)
        for group in groups
    ]
    return tokens, seconds


def speeds(answers: Sequence[Answer], tokens_and_seconds: metrics.Rate) -> dict[str, Any]:
    """Return tokens/s, and the time between tokens as in `metrics.token_seconds`: that of a piece, divided by its
    tokens."""
    between = [
        (now - before) / count
        for answer in answers
        for (before, _), (now, count) in pairwise(answer.pieces)
        for _ in range(count)
    ]
    tokens, seconds = map(sum, tokens_and_seconds)
    return {
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "ms_per_token": 1e3 * seconds / max(tokens, 1),
        "token_ms": metrics.token_percentiles(between),
    }


def compare_texts(
    groups: Sequence[Group],
    prompts: Sequence[Prompt],
    temperature: float,
    differences: Sequence[Divergence] | None,
    draws: Draws | None,
) -> Exact:
    """Return the record `exact`. Greedy texts are compared with plain decoding here, which judges differences, else
    with those of the plain server, which are only counted: two servers may round differently."""
    indices = [i for group in groups for i in group.indices]
    exact = Exact(prompts=len(indices), identical=None, divergences=[], near_ties=[], against="nothing")
    if draws is not None:
        exact.against = "distribution"
        exact.draws = draws.record()
    elif differences is not None:
        ids = {(prompts[i].suite, prompts[i].id) for i in indices}
        differences = [difference for difference in differences if (difference.suite, difference.prompt) in ids]
        exact.against = "runtime"
        exact.divergences = [difference for difference in differences if not difference.near_tie]
        exact.near_ties = [difference for difference in differences if difference.near_tie]
        exact.identical = len(indices) - len(exact.divergences)
    elif temperature == 0 and groups[0].plain:
        pairs = [pair for group in groups for pair in zip(group.answers[0], group.plain[0], strict=True)]
        exact.against = "plain server"
        exact.identical = sum((one.tokens or one.text) == (other.tokens or other.text) for one, other in pairs)
    return exact
