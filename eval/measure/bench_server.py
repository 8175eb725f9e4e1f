"""Measurement of a running server, with anybody's head, as the contents of results.json.

Prompts are sent in groups, and vLLM's counters are read between groups. At concurrency 1 a group is one prompt; above,
WAVES prompts for each request in flight, so that the end of a group, where fewer are in flight, is short. Intervals are
bootstraps over prompts if the server says each answer's rounds, else over groups, and over groups for speeds. tau is
tokens that came out per round, as everywhere.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import fmean

import torch
from transformers import PreTrainedTokenizerBase

from eval.measure import metrics
from eval.measure.chat_template import with_arguments
from eval.measure.environment import dtype_options, head_facts, machine, target_facts
from eval.measure.figures import top_two_margin
from eval.measure.loading import fitting_head, open_target, open_target_of, read_prompts
from eval.measure.measure import split_units, units_by_suite
from eval.measure.progress import Progress
from eval.measure.prompts import HELD_OUT_SUITE, Prompt
from eval.measure.results import SCHEMA_VERSION, Results
from eval.measure.server import DRAFTS, Answer, Rounds, Server, count_rounds
from eval.measure.settings import BenchSettings
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.identity import FAR, find_flips, first_difference
from eval.runtime.sampling_params import Sampling
from heads.targets.hub import is_here
from heads.targets.load import load_tokenizer
from heads.targets.model import FrozenTarget

WAVES = 4
"""Prompts of a group for each request in flight, at a concurrency above 1."""
CHECKED_TOKENS = 16
FOREIGN = 2.0
"""Logits by which a greedy token may be below the target's own choice before the server has another target. Two dtypes
of one model differ by less."""


@dataclass
class Group:
    """Prompts between two readings of the counters, with their answers by repeat."""

    indices: list[int]
    answers: list[list[Answer]] = field(default_factory=list)
    plain: list[list[Answer]] = field(default_factory=list)
    rounds: list[Rounds] = field(default_factory=list)
    """By repeat: those of each answer, or those of all together."""

    def units(self) -> list[tuple[int, int]]:
        """Return the tokens and the rounds after the first token of each prompt, or of all together."""
        step = len(self.rounds) // len(self.answers)
        made = [[a.decoded for a in repeat] for repeat in self.answers]
        made = made if step == len(self.indices) else [[sum(tokens)] for tokens in made]
        numbers = [sum(part.number for part in self.rounds[n::step]) for n in range(step)]
        return list(zip(map(sum, zip(*made, strict=True)), numbers, strict=True))


@dataclass(frozen=True)
class Reference:
    """The server's target, loaded here."""

    target: FrozenTarget
    tokenizer: PreTrainedTokenizerBase

    def requests(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Request]:
        return [Request(list(prompt.ids), max_new_tokens) for prompt in prompts]

    def engine(self, requests: Sequence[Request]) -> Engine:
        length = max(len(request.prompt) + request.max_new_tokens for request in requests) + 1
        return Engine(self.target, None, EngineOptions(max_length=length))

    def check(self, server: Server, prompt: Prompt) -> None:
        """Raise UserError if the server's greedy answer cannot be the target's."""
        tokens = server.ask(prompt, Sampling(), CHECKED_TOKENS, self.target.eos_token_ids).tokens
        (request,) = requests = self.requests([prompt], CHECKED_TOKENS)
        if tokens and max(tokens) < self.target.vocab_size:
            flips = find_flips(self.engine(requests), request, tokens)
            if all(flip.gap <= FOREIGN for flip in flips):
                return
        elif not tokens:
            return
        raise server.error(
            f"serves {server.root}, whose greedy answer is not that of {self.target.name}; name its own "
            "target, or serve the same weights"
        )

    def differences(
        self, prompts: Sequence[Prompt], texts: Sequence[list[int]], max_new_tokens: int, tree: str
    ) -> list[Results]:
        """Return where greedy texts of a server differ from plain decoding here. One is a `near_tie` if each of its
        tokens is within rounding of the target's choice."""
        requests = self.requests(prompts, max_new_tokens)
        engine, found = self.engine(requests), []
        for prompt, request, text in zip(prompts, requests, texts, strict=True):
            (output,) = engine.generate([request])
            position = first_difference(output.tokens, text)
            if position is None:
                continue
            flips = find_flips(engine, request, text)
            pair = [ids[position] if position < len(ids) else None for ids in (output.tokens, text)]
            shown = [
                None if token is None else self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
                for token in pair
            ]
            before = [*prompt.ids, *text[:position]]
            found.append(
                {"suite": prompt.suite, "prompt": prompt.id, "tree": tree, "against": "plain", "temperature": 0.0}
                | {"position": position, "plain_text": shown[0], "text": shown[1]}
                | {"top_two_margin": top_two_margin(self.target, before, Sampling())}
                | {"near_tie": None not in pair and all(flip.is_within(FAR) for flip in flips)}
                | {"flips": [asdict(flip) for flip in flips]}
            )
        return found


def bench_server(options: argparse.Namespace, settings: BenchSettings) -> Results:
    """Measure the server `--server`, beside `--plain-server` if there is one. The target is loaded if a head or
    `--target` names it; else only its tokenizer, if the folder that the server names is here."""
    server = Server(options.server)
    plain = Server(options.plain_server, plain=True) if options.plain_server else None
    if plain and plain.root != server.root:
        raise plain.error(f"serves {plain.root}, where {server.url} serves {server.root}; serve the same target")
    (head,) = options.heads or [None]
    reference = tokenizer = drafter = None
    if head or options.target:
        target, tokenizer = open_target_of(head, options) if head else open_target(options.target, options)
        reference = Reference(target, tokenizer)
        drafter = fitting_head(head, target) if head else None
    elif is_here(server.root):
        tokenizer = load_tokenizer(server.root, trust_remote_code=options.trust_remote_code)
        tokenizer = with_arguments(tokenizer, options.template or {})
    settings = replace(settings, trees=(f"chain:{server.depth}",))
    if reference:
        settings = settings.as_served(reference.target)
    elif settings.sampling:
        raise server.error(f"--sampling {settings.sampling}: is read from the target here; name it with --target")
    prompts = choose(server, tokenizer, settings, reference.target.vocab_size if reference else None)
    if reference is not None:
        reference.check(server, prompts[0])
    measured = measure_server(server, plain, reference, prompts, settings)
    facts = machine(torch.device("cpu"))
    facts["versions"] |= {server.engine.lower(): server.version}
    named = ["--server", server.url, *(["--plain-server", plain.url] if plain else [])]
    if reference:
        named += ["--target", reference.target.name, *dtype_options(reference.target)]
    return {
        "schema_version": SCHEMA_VERSION,
        "target": target_facts(reference.target) if reference else {"name": server.root},
        **facts,
        "device": {"name": f"{server.name} at {server.url}"},
        "dtype": "its own dtype",
        "server": {"name": server.name, "url": server.url, "model": server.model, "plain_url": plain and plain.url},
        "settings": settings.record(prompts),
        "command": ["python", "eval/bench.py", *([head] if head else []), *named, *settings.options()[2:]],
        **measured,
        "head": head_facts(drafter, head)
        if drafter
        else {"kind": "draft", "path": server.url, "sha256": None, "parameters": 0, "aux_layer_ids": [], "config": {}},
    }


def choose(
    server: Server, tokenizer: PreTrainedTokenizerBase | None, settings: BenchSettings, vocab_size: int | None
) -> list[Prompt]:
    """Return the prompts, including later turns, which follow the server's own greedy answers. `vocab_size`: number of
    the target's tokens, if it is here."""
    if tokenizer is None and HELD_OUT_SUITE in settings.prompts:
        raise server.error(
            f"{HELD_OUT_SUITE} is cut by tokens, and the tokenizer of {server.root} is not here; name the target with "
            "--target, or other --prompts"
        )

    def answer(prompts: Sequence[Prompt]) -> list[str]:
        return [server.ask(prompt, Sampling(), settings.max_new_tokens).text for prompt in prompts]

    room = server.context_length - settings.max_new_tokens - server.depth - 1
    return read_prompts(settings, tokenizer, min(settings.max_prompt_tokens or room, room), answer, vocab_size)


def measure_server(
    server: Server,
    plain: Server | None,
    reference: Reference | None,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
) -> Results:
    """Return the measured part of results.json: the figures of every temperature and concurrency, and those of the
    first one's suites."""
    measurements: list[Results] = []
    suites: dict[str, Results] = {}
    for temperature in settings.temperatures:
        for _, concurrency in settings.points:
            at = replace(settings, batch_size=concurrency)
            groups = ask_all(server, plain, reference, prompts, at, temperature)
            answers = {i: answer for group in groups for i, answer in zip(group.indices, group.answers[0], strict=True)}
            differences = None
            if reference is not None and temperature == 0 and all(answer.tokens for answer in answers.values()):
                with Progress(f"decoding {len(prompts)} prompts here, to compare the texts", announced=True):
                    texts = [answers[i].tokens for i in range(len(prompts))]
                    differences = reference.differences(
                        prompts, texts, settings.max_new_tokens, f"chain:{server.depth}"
                    )
            take = partial(figures, server.depth, prompts, temperature, differences)
            point = {"batch_size": concurrency} if settings.batch_sizes else {}
            measurements.append(take(groups) | point)
            if not suites:
                units = units_by_suite(prompts, [group.indices for group in groups])
                suites = {name: take([groups[n] for n in own]) for name, own in units.items()}
    exacts = [m["exact"] for m in measurements]
    compared = [exact for exact in exacts if exact["identical"] is not None]
    exact = (compared or exacts)[0] | {
        "prompts": sum(exact["prompts"] for exact in compared or exacts),
        "identical": sum(exact["identical"] for exact in compared) if compared else None,
        "divergences": [found for exact in exacts for found in exact["divergences"]],
        "near_ties": [found for exact in exacts for found in exact["near_ties"]],
    }
    if exact["divergences"]:
        for m in (*measurements, *suites.values()):
            m["speedup"] = None
    return measurements[0] | {"exact": exact, "suites": suites, "measurements": measurements, "samples": []}


def ask_all(
    server: Server,
    plain: Server | None,
    reference: Reference | None,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    temperature: float,
) -> list[Group]:
    """Send all prompts, `settings.repeats` times, to the server and the plain one in turns."""
    concurrency, sampling = settings.batch_size, settings.sampling_at(temperature)
    stop_ids = reference.target.eos_token_ids if reference else ()
    size = concurrency if concurrency == 1 else WAVES * concurrency
    groups = [Group(indices) for indices in split_units(prompts, size)]
    what = (
        f"asking {server.url} {'greedily' if temperature == 0 else f'at T = {temperature:g}'}, {concurrency} in flight"
    )
    total = settings.repeats * len(prompts) * (2 if plain else 1)
    with ThreadPoolExecutor(concurrency) as pool, Progress(f"{what}: answer", total) as progress:

        def send(asked: Server, indices: Sequence[int]) -> list[Answer]:
            def one(i: int) -> Answer:
                own = replace(sampling, seed=sampling.seed + i)
                return asked.ask(prompts[i], own, settings.max_new_tokens, stop_ids)

            answers = list(pool.map(one, indices))
            progress.advance(len(indices))
            return answers

        counted = server.counters() if server.engine == "vLLM" else Counter()
        for asked in filter(None, (plain, server)):
            warm = asked.ask(prompts[0], sampling, settings.max_new_tokens)  # not measured: a first answer is slow
        if is_counting := server.engine == "vLLM" and not warm.rounds:
            counted = server.settled(counted, [warm])
        for repeat in range(settings.repeats):
            for n, group in enumerate(groups):
                if plain and (repeat + n) % 2:
                    group.plain.append(send(plain, group.indices))
                group.answers.append(send(server, group.indices))
                if is_counting:
                    before, counted = counted, server.settled(counted, group.answers[-1])
                    accepted = [counted[str(k)] - before[str(k)] for k in range(server.depth)]
                    group.rounds.append(count_rounds(counted[DRAFTS] - before[DRAFTS], accepted, group.answers[-1]))
                else:
                    group.rounds += [server.rounds_of(answer) for answer in group.answers[-1]]
                if plain and not (repeat + n) % 2:
                    group.plain.append(send(plain, group.indices))
    if not any(answer.decoded for group in groups for answer in group.answers[0]):
        raise server.error("every answer ended with its first token; use other prompts, or allow more new tokens")
    return groups


def figures(
    depth: int,
    prompts: Sequence[Prompt],
    temperature: float,
    differences: Sequence[Results] | None,
    groups: Sequence[Group],
) -> Results:
    """Return the figures of one setting over some groups, over all repeats. `differences`: those of all greedy texts
    from plain decoding here, or None if there was no comparison."""
    parts = [part for group in groups for part in group.rounds]
    accepted = [sum(column) for column in zip(*(part.accepted for part in parts), strict=True)]
    tested = [sum(column) for column in zip(*(part.tested for part in parts), strict=True)]
    answers = [answer for group in groups for repeat in group.answers for answer in repeat]
    decoded, numbers = zip(*(unit for group in groups for unit in group.units()), strict=True)
    by_prompt = len(numbers) == sum(len(group.indices) for group in groups)
    each = [tokens / number for tokens, number in zip(decoded, numbers, strict=True) if number]
    made, plain = rate([group.answers for group in groups]), rate([group.plain for group in groups])
    speed = speeds(answers, made) | {"ms_per_round": 1e3 * sum(made[1]) / max(sum(numbers), 1)}
    return {
        "tree": f"chain:{depth}",
        "depth": depth,
        "nodes": depth + 1,
        "temperature": temperature,
        "rule": "match" if temperature == 0 else "server",
        "exact": compare(groups, prompts, temperature, differences),
        "tau": {
            "mean": sum(decoded) / max(sum(numbers), 1),
            "ci95": metrics.ratio_interval(decoded, numbers),
            "per_request": fmean(each) if each and by_prompt else None,
        },
        "alpha": [n / rounds if rounds else None for n, rounds in zip(accepted, tested, strict=True)],
        "accepted_histogram": [n - deeper for n, deeper in pairwise([sum(numbers), *accepted, 0])],
        "loop_share": metrics.loop_share([answer.tokens for answer in answers]) if answers[0].tokens else None,
        "tokens": sum(answer.count for answer in answers),
        "undecoded": sum(answer.count == 1 for group in groups for answer in group.answers[0]),
        "first_token_ms": metrics.token_percentiles(  # of the first repeat: servers cache prompts
            [answer.pieces[0][0] - answer.sent for group in groups for answer in group.answers[0]]
        ),
        "baseline": speeds([a for group in groups for repeat in group.plain for a in repeat], plain)
        if groups[0].plain
        else None,
        "speculative": speed,
        "speedup": {
            "measured": metrics.rate_ratio(made, plain),
            "ci95": metrics.rate_ratio_interval(made, plain),
            "predicted": None,
            "tokens": min(sum(made[0]), sum(plain[0])),
        }
        if groups[0].plain
        else None,
    }


def rate(groups: Sequence[Sequence[Sequence[Answer]]]) -> metrics.Rate:
    """Return the tokens after each answer's first, and the seconds from the first token of a group to its last, by
    group."""
    tokens = [sum(answer.decoded for repeat in group for answer in repeat) for group in groups]
    seconds = [
        sum(max(a.pieces[-1][0] for a in repeat) - min(a.pieces[0][0] for a in repeat) for repeat in group)
        for group in groups
    ]
    return tokens, seconds


def speeds(answers: Sequence[Answer], made: metrics.Rate) -> Results:
    """Return tokens/s, and the time between tokens as in `metrics.token_seconds`: that of a piece, divided by its
    tokens."""
    between = [
        (now - before) / count
        for answer in answers
        for (before, _), (now, count) in pairwise(answer.pieces)
        for _ in range(count)
    ]
    return {
        "tokens_per_second": sum(made[0]) / max(sum(made[1]), 1e-9),
        "ms_per_token": 1e3 * sum(made[1]) / max(sum(made[0]), 1),
        "token_ms": metrics.token_percentiles(between),
    }


def compare(
    groups: Sequence[Group], prompts: Sequence[Prompt], temperature: float, differences: Sequence[Results] | None
) -> Results:
    """Return the record `exact`. Greedy texts are compared with plain decoding here, which judges differences, else
    with those of the plain server, which are only counted: two servers may round differently."""
    indices = [i for group in groups for i in group.indices]
    record: Results = {"prompts": len(indices), "identical": None, "divergences": [], "near_ties": []}
    if differences is not None:
        chosen = {(prompts[i].suite, prompts[i].id) for i in indices}
        own = [found for found in differences if (found["suite"], found["prompt"]) in chosen]
        wrong = [found for found in own if not found["near_tie"]]
        near = [found for found in own if found["near_tie"]]
        same = len(indices) - len(wrong)
        return record | {"against": "runtime", "identical": same, "divergences": wrong, "near_ties": near}
    if temperature > 0 or not groups[0].plain:
        return record | {"against": "nothing"}
    pairs = [pair for group in groups for pair in zip(group.answers[0], group.plain[0], strict=True)]
    same = sum((one.tokens or one.text) == (other.tokens or other.text) for one, other in pairs)
    return record | {"against": "plain server", "identical": same}
