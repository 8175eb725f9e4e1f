"""Speed and texts of this runtime beside those of engines: one target and head, the same prompts, batch 1, greedy.

Every prompt is decoded by all of them before the next one, and none is always first.
"""

from asyncio import Runner
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from eval.core.progress import Progress
from eval.data.prompts import Prompt
from eval.measure.roofline import bytes_read, copy_bandwidth
from eval.records.metrics import rate_ratio, rate_ratio_interval
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling_params import Sampling
from eval.servers.engine_client import EngineServer
from eval.servers.engine_process import need_python, running
from eval.servers.gguf_conversion import Q8_0, convert, spec_type
from eval.servers.openai_client import check_url
from eval.servers.parity_engines import open_server
from heads.core.contract import Drafter
from heads.core.errors import UserError
from heads.core.tree import parse_shape
from heads.registry import kind_of
from heads.targets.frozen_target import FrozenTarget
from heads.targets.quantization import weight_bytes

FLOAT32 = "float32"
WARM_UP_TOKENS = 8


class Way(NamedTuple):
    """One way of decoding."""

    engine: str
    weights: str
    draft_tokens: int


class Decoded(NamedTuple):
    tokens: list[int]
    seconds: float
    """From the first token to the last."""
    passes: int
    """Passes of the target after the prompt's."""


Decode = Callable[[Prompt, int], Decoded]
"""Decodes a prompt, with so many new tokens."""


@dataclass
class Totals:
    """What one way of decoding gave, by prompt."""

    texts: list[list[int]] = field(default_factory=list)
    passes: int = 0
    tokens: list[float] = field(default_factory=list)
    """Decoded tokens of all repeats, without each text's first."""
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> tuple[list[float], list[float]]:
        return self.tokens, self.seconds

    @property
    def tau(self) -> float:
        return sum(len(text) - 1 for text in self.texts) / max(self.passes, 1)

    def equal(self, other: "Totals") -> int:
        return sum(one == another for one, another in zip(self.texts, other.texts, strict=True))


class Row(NamedTuple):
    """A row of the record and of the table."""

    engine: str
    weights: str
    draft_tokens: int
    tokens_per_second: float
    tau: float
    over_plain: float
    over_plain_interval: tuple[float, float] | None
    bound_tokens_per_second: float | None
    """Of float32: at tau, if a pass took the time in which its weights are read."""
    equal_to_plain: int
    """Texts that are those of the same engine and weights without a draft."""
    equal_to_float32: int
    """Texts that are this runtime's plain ones."""
    texts: int


def engines_here(target: FrozenTarget, head: Drafter, depths: Sequence[int], length: int) -> dict[int, Engine]:
    """Return this runtime's engines by their draft tokens; 0: without a draft."""
    plain = Engine(target, None, EngineOptions(max_length=length))
    chains = {depth: EngineOptions(shape=parse_shape(f"chain:{depth}"), max_length=length) for depth in depths}
    return {0: plain, **{depth: Engine(target, head, options) for depth, options in chains.items()}}


def decode_here(engine: Engine) -> Decode:
    def decode(prompt: Prompt, count: int) -> Decoded:
        (output,) = engine.generate([Request(list(prompt.ids), count)])
        return Decoded(output.tokens, engine.timings.decode_seconds, output.rounds)

    return decode


def decode_there(server: EngineServer, runner: Runner, ends: Sequence[int]) -> Decode:
    def decode(prompt: Prompt, count: int) -> Decoded:
        answer = runner.run(server.ask(prompt, Sampling(), count, ends))
        decoded = len(answer.tokens) - 1
        rounds = sum(answer.rounds) or decoded - answer.accepted
        return Decoded(answer.tokens, answer.pieces[-1][0] - answer.pieces[0][0], max(rounds, 1))

    return decode


@contextmanager
def llamacpp_servers(
    target: FrozenTarget, head: Drafter, folders: tuple[str, str], files: Sequence[str], depths: Sequence[int],
    length: int, runner: Runner, made: Path,
) -> Iterator[dict[Way, Decode]]:  # fmt: skip
    """Run llama.cpp's server for each file of the target, without and with the head, for a `with` block. `folders`: of
    target and head. The head is in float32 beside the target in float32, and else in 8 bits, as it is published."""
    python = need_python("llama.cpp")
    kind = kind_of(head)
    whole = None if kind == "draft" else folders[0]
    targets = {FLOAT32: str(made / "target.gguf"), **{Path(file).stem: str(Path(file).absolute()) for file in files}}
    heads = {form: made / f"head-{form}.gguf" for form in ("f32", *([Q8_0] if files else []))}
    with Progress("converting for llama.cpp", announced=True):
        convert(folders[0], Path(targets[FLOAT32]), log=made / "log")
        for form, file in heads.items():
            convert(folders[1], file, target=whole, dtype=form, log=made / "log")
    job = {"method": spec_type(kind), "threads": torch.get_num_threads(), "context": max(256, length), "cache": "f32"}
    decoders: dict[Way, Decode] = {}
    with ExitStack() as opened:
        for name, path in targets.items():
            for depth in (0, *depths):
                drafting = str(heads["f32" if name == FLOAT32 else Q8_0]) if depth else None
                place = made / f"{name}-{depth}"
                place.mkdir()
                own = {**job, "target": path, "head": drafting, "depth": depth}
                what = f"{path}: llama.cpp refuses it"
                url = opened.enter_context(running(python, "llamacpp_server.py", own, what=what, folder=place))
                server = opened.enter_context(open_server(url, runner.run))
                decoders[Way("llama.cpp", name, depth)] = decode_there(server, runner, target.eos_token_ids)
        yield decoders


@contextmanager
def running_servers(urls: Sequence[str], target: FrozenTarget, runner: Runner) -> Iterator[dict[Way, Decode]]:
    """Open servers that run already, with the target in float32, for a `with` block. UserError if one drafts, and none
    of its engine decodes plainly."""
    decoders: dict[Way, Decode] = {}
    with ExitStack() as opened:
        for url in urls:
            server = opened.enter_context(open_server(check_url(url), runner.run))
            way = Way(server.engine, FLOAT32, server.depth)
            decoders[way] = decode_there(server, runner, target.eos_token_ids)
        for way in decoders:
            if way._replace(draft_tokens=0) not in decoders:
                raise UserError(f"--server: {way.engine} drafts; name one without a draft, too, to compare it with")
        yield decoders


def decode_in_turns(
    decoders: Mapping[Way, Decode], prompts: Sequence[Prompt], new_tokens: int, repeats: int
) -> dict[Way, Totals]:
    order = list(decoders)
    found = {way: Totals(tokens=[0.0] * len(prompts), seconds=[0.0] * len(prompts)) for way in order}
    for decode in decoders.values():
        decode(prompts[0], WARM_UP_TOKENS)
    with Progress("decoding: text", repeats * len(prompts) * len(order)) as progress:
        for repeat in range(repeats):
            for i, prompt in enumerate(prompts):
                turn = (repeat + i) % len(order)
                for way in order[turn:] + order[:turn]:
                    tokens, seconds, passes = decoders[way](prompt, new_tokens)
                    totals = found[way]
                    if repeat == 0:
                        totals.texts.append(tokens)
                        totals.passes += passes
                    totals.tokens[i] += len(tokens) - 1
                    totals.seconds[i] += seconds
                    progress.advance()
    return found


def rows_of(found: Mapping[Way, Totals], here: Mapping[int, Engine], ours: str) -> tuple[list[Row], float]:
    """Return the rows, and the measured bandwidth in bytes a second. `here`: this runtime's engines by draft tokens;
    `ours`: its name."""
    bandwidth = copy_bandwidth(here[0])
    weights = weight_bytes(here[0].target.model)
    rows = []
    for way, totals in found.items():
        plain = found[way._replace(draft_tokens=0)]
        bound = None
        if way.weights == FLOAT32 and way.draft_tokens in here:
            drafted = bytes_read(here[way.draft_tokens])[0] if way.draft_tokens else 0
            bound = totals.tau * bandwidth / (weights + drafted)
        row = Row(
            *way, tokens_per_second=sum(totals.tokens) / sum(totals.seconds), tau=totals.tau,
            over_plain=rate_ratio(totals.rate, plain.rate),
            over_plain_interval=rate_ratio_interval(totals.rate, plain.rate) if way.draft_tokens else None,
            bound_tokens_per_second=bound, equal_to_plain=totals.equal(plain),
            equal_to_float32=totals.equal(found[Way(ours, FLOAT32, 0)]), texts=len(totals.texts),
        )  # fmt: skip
        rows.append(row)
    return rows, bandwidth
