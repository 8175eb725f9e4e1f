"""The parts of the GPU suite. Each takes a bench and writes down what it finds, as plain values for JSON.

Whatever part fails, the others are still run: see scripts/gpu_suite.py.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eval.benchmark.roofline import copy_bandwidth, fill_batch, roofline, round_seconds
from eval.gpu.baselines import WAYS, tokens_per_second
from eval.gpu.checks import CHECKS
from eval.gpu.drafts import draft_parts
from eval.gpu.idle import measure_idle
from eval.gpu.kernels import ROWS, kernel_parts
from eval.gpu.models import Models, code_requests, draft_for_assisted, grown_models, small_models
from eval.runtime.engine import Engine, Output, Request
from eval.runtime.identity import find_flips, pinned_engine
from heads.tree import parse_shape
from scripts.model_shapes import SHAPES

Found = dict[str, Any]
Part = Callable[["Bench", Found], None]
"""What it finds it writes down at once, so that a part that breaks leaves what it had."""
TREES = ("chain:5", "tree:6x8x32")
PROMPT, NEW, LONG = 96, 160, 256
"""Tokens of a prompt, of a text that is timed, of one that is held against its reference."""
LENGTH, CONTEXT = 2048, 1024
"""Of the texts behind which kernels, and plain steps, are timed."""
VERIFIED = (8, 16, 32, 64)
"""Nodes of the steps that are compared with a step of one."""
BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32), (512, 2048, 8192, 32768, 122880)
"""Rows, each behind a text of the first of the contexts; and contexts, each of one row."""


@dataclass
class Bench:
    """What the parts share."""

    device: torch.device
    shape: str
    """Of `scripts.model_shapes.SHAPES`."""
    head: Path | None
    deadline: float
    """`time.monotonic` after which no long part goes on."""
    prompts: int = 200
    timed_prompts: int = 6
    note: Callable[[], None] = lambda: None
    """Has what was found so far written down: a part that is stopped leaves it."""

    @cached_property
    def bandwidth(self) -> float:
        return copy_bandwidth(self.device)

    @cached_property
    def small(self) -> Models:
        return small_models(self.device, self.head)

    @cached_property
    def grown(self) -> Models:
        return grown_models(self.small, self.shape, self.device)

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline

    def leaves_out(self, what: str, found: Found) -> bool:
        """Whether there is no time for it, which is then found."""
        if self.out_of_time:
            found.setdefault("left_out", []).append(what)
        return self.out_of_time

    def engine(self, models: Models, tree: str, batch_size: int = 1, max_length: int = 512, **options: Any) -> Engine:
        """An engine for a tree, or for plain decoding where it is `none`."""
        head = None if tree == "none" else models.head
        shape = parse_shape(tree)
        return Engine(models.target, head, shape=shape, batch_size=batch_size, max_length=max_length, **options)


def checks(bench: Bench, found: Found) -> None:
    """`eval.gpu.checks`, each by itself."""
    found["failed"] = 0
    for name, check in CHECKS.items():
        if bench.leaves_out(name, found):
            continue
        started = time.monotonic()
        try:
            check()
            found[name] = "passed"
        except Exception as error:  # whatever breaks, the others are to be seen
            found[name] = f"{type(error).__name__}: {error}"[:800]
            found["failed"] += 1
        print(f"  {name}: {found[name]}, {time.monotonic() - started:.0f} s", flush=True)
        bench.note()


def kernels(bench: Bench, found: Found) -> None:
    """Every kernel at the big shape beside its floor."""
    found["copy_bandwidth"] = bench.bandwidth
    for rows in ROWS:
        if bench.leaves_out(f"{rows} rows", found):
            continue
        parts = kernel_parts(SHAPES[bench.shape], rows, LENGTH, bench.device)
        found[str(rows)] = [part.record(bench.bandwidth) for part in parts]
        bench.note()


def draft_steps(bench: Bench, found: Found) -> None:
    """A head's steps at the big shape beside their floor."""
    parts = draft_parts(SHAPES[bench.shape], LENGTH, bench.device)
    found["parts"] = [part.record(bench.bandwidth) for part in parts]


def identity(bench: Bench, found: Found) -> None:
    """Texts of the small target in bfloat16 against pinned plain decoding."""
    for tree, strict in ((TREES[0], False), (TREES[1], False), (TREES[1], True)):
        for temperature in (0.0, 1.0):
            name = f"{tree}{' strict' if strict else ''}, temperature {temperature:g}"
            if bench.leaves_out(name, found):
                continue
            requests = code_requests(bench.prompts, PROMPT, LONG, temperature)
            engine = bench.engine(bench.small, tree, 8, PROMPT + LONG + 64, strict=strict)
            found[name] = compare(engine, requests)
            bench.note()


def compare(engine: Engine, requests: list[Request]) -> Found:
    """How many texts are the reference's, and what the others' first flips are."""
    pinned = pinned_engine(engine)
    ours, theirs = engine.generate(requests), pinned.generate(requests)
    differ = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a.tokens != b.tokens]
    audited = [find_flips(pinned, requests[i], ours[i].tokens) for i in differ[:10]]
    flips = [flip for found in audited for flip in found]
    return {
        "prompts": len(requests),
        "identical": len(requests) - len(differ),
        "tau": tau_of(ours),
        "audited": len(audited),
        "flips": len(flips),
        "flips_beyond_near_ties": sum(not flip.is_near_tie for flip in flips),
        "largest_gap_in_ulp": max((flip.gap / flip.ulp for flip in flips if flip.ulp), default=0.0),
    }


def tau_of(outputs: list[Output]) -> float:
    """Tokens a target pass."""
    rounds = sum(output.rounds for output in outputs)
    return sum(len(output.tokens) - 1 for output in outputs) / max(rounds, 1)


def plain(bench: Bench, found: Found) -> None:
    """Plain decoding at the big shape: its share of the bandwidth, part by part, and what more nodes cost."""
    engine = bench.engine(bench.grown, "none", max_length=2 * CONTEXT)
    record = roofline(engine, engine, length=CONTEXT, tau=1.0, bandwidth=bench.bandwidth)
    found |= {"parts": record["plain"], "us": record["plain_us"], "share": record["plain_share_of_bandwidth"]}
    found["tokens_per_second"] = 1e6 / record["plain_us"]
    found["graphs"] = bool(engine.rounds_of(engine.decoder).graphs)
    found["verify_over_one"] = {}
    bench.note()
    for nodes in VERIFIED:
        pinned = bench.engine(bench.grown, "none", max_length=2 * CONTEXT, pinned=nodes)
        fill_batch(pinned, CONTEXT)
        found["verify_over_one"][nodes] = 1e6 * round_seconds(pinned, CONTEXT) / record["plain_us"]


def idle(bench: Bench, found: Found) -> None:
    """How long the device stands idle inside rounds and between them."""
    for tree in ("none", *TREES):
        engine = bench.engine(bench.grown, tree)
        fill_batch(engine, PROMPT)
        found[tree] = measure_idle(engine, PROMPT)
        bench.note()


def drafting(bench: Bench, found: Found) -> None:
    """Rounds at the big shape: where their time goes, and the speedup in whole texts."""
    requests = code_requests(bench.timed_prompts, PROMPT, NEW)
    reference = bench.engine(bench.grown, "none")
    for tree in TREES:
        engine = bench.engine(bench.grown, tree)
        for warm in (reference, engine):
            warm.generate(requests[:1])
        seconds, (_, outputs) = decode_seconds((reference, engine), requests)
        tau = tau_of(outputs)
        record = roofline(engine, reference, length=PROMPT + NEW // 2, tau=tau, bandwidth=bench.bandwidth)
        draft = next(part for part in record["round"] if part["part"] == "draft")
        speedup = seconds[0] / seconds[1]
        found[tree] = {
            "tau": tau,
            "speedup": speedup,
            "speedup_over_tau": speedup / tau,
            "tokens_per_second": len(requests) * (NEW - 1) / seconds[1],
            "draft_over_floor": draft["over_floor"],
            "glue_us": record["glue_us"],
            "roofline": record,
        }
        bench.note()


@torch.no_grad()
def useless_head(bench: Bench, found: Found) -> None:
    """A head of random weights under the controller, over plain decoding."""
    head = copy.deepcopy(bench.grown.head)
    for parameter in head.parameters():
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1)
    requests = code_requests(bench.timed_prompts, PROMPT, NEW)
    useless = Models(bench.grown.target, head, bench.grown.facts)
    variants = bench.engine(bench.grown, "none"), bench.engine(useless, TREES[0], adaptive=True)
    for variant in variants:
        variant.generate(requests[:2])
    seconds = decode_seconds(variants, requests)[0]
    found |= {"over_plain": seconds[0] / seconds[1], "rungs": dict(variants[1].timings.candidates)}


def decode_seconds(engines: Sequence[Engine], requests: list[Request]) -> tuple[list[float], list[list[Output]]]:
    """Of all requests by each engine, in turns, and what they gave."""
    seconds = [0.0] * len(engines)
    outputs: list[list[Output]] = [[] for _ in engines]
    for request in requests:
        for place, engine in enumerate(engines):
            outputs[place] += engine.generate([request])
            seconds[place] += engine.timings.decode_seconds
    return seconds, outputs


def ours(bench: Bench, found: Found) -> None:
    """Tokens a second at the big shape, prefill included, as the library's ways are measured."""
    requests = code_requests(4, PROMPT, NEW)
    for tree in ("none", *TREES):
        engine = bench.engine(bench.grown, tree)
        engine.generate(requests[:1])
        started = time.perf_counter()
        engine.generate(requests[1:])
        found[tree] = NEW * (len(requests) - 1) / (time.perf_counter() - started)


def library(way: str) -> Part:
    """One of the library's ways, tokens a second on the same prompts."""

    def part(bench: Bench, found: Found) -> None:
        draft = draft_for_assisted(bench.small, bench.grown.target) if way == "assisted generation" else None
        requests = code_requests(4, PROMPT, NEW)
        found["tokens_per_second"] = tokens_per_second(bench.grown.target, requests, way, draft)

    part.__name__ = way
    return part


def scaling(bench: Bench, found: Found) -> None:
    """Seconds of a plain step and of a round against batch and context: tau times the first over the second is the
    speedup."""
    found |= {"batch": {}, "context": {}}
    cases = [("batch", b, CONTEXTS[0]) for b in BATCHES] + [("context", 1, length) for length in CONTEXTS]
    for kind, batch_size, length in cases:
        if bench.leaves_out(f"{kind} {batch_size if kind == 'batch' else length}", found):
            continue
        us = {}
        for tree in ("none", TREES[0]):
            engine = bench.engine(bench.grown, tree, batch_size, length + 256)
            fill_batch(engine, 16)
            with torch.inference_mode():
                engine.decoder.state.length.fill_(length)  # an empty cache takes as long to read
            us[tree] = 1e6 * round_seconds(engine, length)
            del engine
        torch.cuda.empty_cache()
        found[kind][batch_size if kind == "batch" else length] = {**us, "plain_over_round": us["none"] / us[TREES[0]]}
        bench.note()


GROUPS: dict[str, tuple[Part, ...]] = {
    "checks": (checks,),
    "grown": (plain, drafting, idle, useless_head, scaling),
    "identity": (identity,),
    "kernels": (kernels, draft_steps),
    "library": (ours, *map(library, WAYS)),
}
"""Parts that share a process: a fault of the device ends one group alone. What matters most comes first."""
