"""The parts of the GPU suite. Each takes a bench and records its findings as plain values for JSON.

If a part fails, the remaining parts still run: see scripts/gpu_suite.py.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from eval.benchmark.measure import make_requests
from eval.benchmark.metrics import tau
from eval.benchmark.prompts import held_out_prompts
from eval.benchmark.roofline import copy_bandwidth, fill_batch, roofline, round_seconds
from eval.runtime.engine import Engine, EngineOptions, Output, Request
from eval.runtime.identity import NEAR, find_flips, pinned_engine
from eval.runtime.sampling import Sampling
from heads.backends.triton.products import COLD
from heads.backends.triton.timing import device_seconds
from heads.target.frozen import load_tokenizer
from heads.tree import parse_shape
from scripts.gpu.draft_steps import draft_parts
from scripts.gpu.kernels import ROWS, kernel_parts
from scripts.gpu.models import LARGEST_DRAFT_VOCAB, TARGET, Models, grow_models, small_models
from scripts.grown.shapes import ModelShape

ROOT = Path(__file__).resolve().parents[2]
Found = dict[str, Any]
Part = Callable[["Bench", Found], None]
"""A part fills its record as it goes, so that a part that fails leaves its findings up to then."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    trees: tuple[str, str] = ("chain:5", "tree:6x8x32")
    prompt: int = 96
    """Tokens of a prompt."""
    new: int = 160
    """New tokens of a timed text."""
    long: int = 256
    """New tokens of a text that is compared with its reference."""
    length: int = 2048
    """Tokens in the cache when kernels are timed."""
    context: int = 1024
    """Tokens in the cache when plain steps are timed."""
    rows: tuple[int, ...] = ROWS
    """Rows of the steps whose kernels are timed."""
    verified: tuple[int, ...] = (8, 16, 32, 64)
    """Nodes of the steps that are compared with a step of one node."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Batch sizes; each row has the first of `contexts` in its cache."""
    contexts: tuple[int, ...] = (512, 2048, 8192, 32768, 122880)
    """Cached tokens, measured at batch 1."""
    prompts: int = 200
    timed_prompts: int = 6
    draft_vocab: int = LARGEST_DRAFT_VOCAB


@dataclass
class Bench:
    """State that the parts share."""

    device: torch.device
    shape: ModelShape
    """Shape that the target is grown to."""
    head: Path | None
    sizes: Sizes = field(default_factory=Sizes)
    note: Callable[[], None] = lambda: None
    """Writes the findings so far, so that a part that is stopped leaves them."""
    seconds: Callable[[Callable[[], Any], torch.device], float] = device_seconds
    cold: int = COLD
    """Bytes of weights that are used in turn, so that they come from memory and not from a cache."""

    @cached_property
    def bandwidth(self) -> float:
        return copy_bandwidth(self.device)

    @cached_property
    def small(self) -> Models:
        return small_models(self.device, self.head)

    @cached_property
    def grown(self) -> Models:
        return grow_models(self.small, self.shape, self.device, self.sizes.draft_vocab)

    def requests(self, count: int, new_tokens: int, temperature: float = 0.0) -> list[Request]:
        """Return requests to continue held-out code, each with its own seed."""
        prompts = held_out_prompts(load_tokenizer(str(TARGET)), count, self.sizes.prompt, seed=0)
        return make_requests(prompts, Sampling(temperature), new_tokens, ignore_eos=True)

    def engine(self, models: Models, tree: str, batch_size: int = 1, max_length: int = 512, **options: Any) -> Engine:
        """Return an engine for a tree, or for plain decoding if `tree` is "none"."""
        head = None if tree == "none" else models.head
        shape = parse_shape(tree)
        return Engine(
            models.target, head, EngineOptions(shape=shape, batch_size=batch_size, max_length=max_length, **options)
        )


class Recorder:
    """A pytest plugin that records every test's outcome as it ends."""

    def __init__(self, bench: Bench, found: Found) -> None:
        self.bench, self.found = bench, found
        found["failed"] = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        self.found[report.nodeid.split("::")[-1]] = "passed" if report.passed else report.longreprtext[-800:]
        self.found["failed"] += not report.passed
        self.bench.note()


def checks(bench: Bench, found: Found) -> None:
    """Run the tests that need a GPU, in parallel processes: compiling kernels takes most of their time."""
    import pytest

    words = [str(ROOT / "tests/gpu"), "-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider"]
    if find_spec("xdist"):  # one test at a time, so that they begin in their order
        words += ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "load", "--maxschedchunk", "1"]
    status = pytest.main(words, plugins=[Recorder(bench, found)])
    if status > 1:
        raise RuntimeError(f"pytest ended with status {int(status)}")


def kernels(bench: Bench, found: Found) -> None:
    """Time every kernel at the big shape and compare it with its floor."""
    found["copy_bandwidth"] = bench.bandwidth
    for rows in bench.sizes.rows:
        parts = kernel_parts(bench.shape, rows, bench.sizes.length, bench.device, bench.seconds, bench.cold)
        found[str(rows)] = [part.record(bench.bandwidth) for part in parts]
        bench.note()


def draft_steps(bench: Bench, found: Found) -> None:
    """Time a head's steps at the big shape and compare them with their floor."""
    parts = draft_parts(bench.shape, bench.sizes.length, bench.device, bench.seconds)
    found["parts"] = [part.record(bench.bandwidth) for part in parts]


def identity(bench: Bench, found: Found) -> None:
    """Compare texts of the small target in bfloat16 with pinned plain decoding."""
    sizes, found["head"] = bench.sizes, bench.small.head_name
    chain, tree = sizes.trees
    for text, strict in ((chain, False), (tree, False), (tree, True)):
        for temperature in (0.0, 1.0):
            name = f"{text}{' strict' if strict else ''}, temperature {temperature:g}"
            requests = bench.requests(sizes.prompts, sizes.long, temperature)
            engine = bench.engine(bench.small, text, 8, sizes.prompt + sizes.long + 64, strict=strict)
            found[name] = compare(engine, requests)
            bench.note()


def compare(engine: Engine, requests: list[Request]) -> Found:
    """Return the number of texts that equal the reference, and statistics of the flips in the first 10 that differ."""
    pinned = pinned_engine(engine)
    ours, theirs = engine.generate(requests), pinned.generate(requests)
    differ = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a.tokens != b.tokens]
    audited = [find_flips(pinned, requests[i], ours[i].tokens) for i in differ[:10]]
    flips = [flip for found in audited for flip in found]
    return {
        "prompts": len(requests),
        "identical": len(requests) - len(differ),
        "tau": tau(ours),
        "audited": len(audited),
        "flips": len(flips),
        "flips_beyond_near_ties": sum(not flip.is_within(NEAR) for flip in flips),
        "largest_gap_in_ulp": max((flip.gap / flip.ulp for flip in flips if flip.ulp), default=0.0),
    }


def plain(bench: Bench, found: Found) -> None:
    """Measure plain decoding at the big shape: its parts, its share of the bandwidth, and the cost of more nodes."""
    engine = bench.engine(bench.grown, "none", max_length=2 * bench.sizes.context)
    record = roofline(engine, engine, length=bench.sizes.context, tau=1.0, bandwidth=bench.bandwidth)
    found |= {"parts": record["plain"], "us": record["plain_us"], "share": record["plain_share_of_bandwidth"]}
    found["tokens_per_second"] = 1e6 / record["plain_us"]
    found["graphs"] = bool(engine.rounds_of(engine.decoder).graphs)
    found["verify_over_one"] = {}
    bench.note()
    for nodes in bench.sizes.verified:
        pinned = bench.engine(bench.grown, "none", max_length=2 * bench.sizes.context, pinned=nodes)
        fill_batch(pinned, bench.sizes.context)
        found["verify_over_one"][nodes] = 1e6 * round_seconds(pinned, bench.sizes.context) / record["plain_us"]


def drafting(bench: Bench, found: Found) -> None:
    """Measure rounds at the big shape: the time of their parts, and the speedup over whole texts."""
    requests = bench.requests(bench.sizes.timed_prompts, bench.sizes.new)
    reference = bench.engine(bench.grown, "none")
    for tree in bench.sizes.trees:
        engine = bench.engine(bench.grown, tree)
        for warm in (reference, engine):
            warm.generate(requests[:1])
        seconds: list[list[float]] = [[], []]
        outputs: list[Output] = []
        for request in requests:  # in turns
            for spent, decoding in zip(seconds, (reference, engine), strict=True):
                made = decoding.generate([request])
                spent.append(decoding.timings.decode_seconds)
            outputs += made
        plainly, drafted = map(sum, seconds)
        mean, length = tau(outputs), bench.sizes.prompt + bench.sizes.new // 2
        record = roofline(engine, reference, length=length, tau=mean, bandwidth=bench.bandwidth)
        draft = next(part for part in record["round"] if part["part"] == "draft")
        speedup = plainly / drafted
        found[tree] = {
            "tau": mean,
            "speedup": speedup,
            "speedup_over_tau": speedup / mean,
            "tokens_per_second": len(requests) * (bench.sizes.new - 1) / drafted,
            "draft_over_floor": draft["over_floor"],
            "glue_us": record["glue_us"],
            "roofline": record,
        }
        bench.note()


def scaling(bench: Bench, found: Found) -> None:
    """Measure the microseconds of a plain step and of a round by batch size and by context. Their ratio times tau is
    the speedup."""
    found |= {"batch": {}, "context": {}}
    sizes, us = bench.sizes, {"none": 0.0, (chain := bench.sizes.trees[0]): 0.0}
    cases = [("batch", size, size, sizes.contexts[0]) for size in sizes.batches]
    for kind, at, batch_size, length in [*cases, *(("context", length, 1, length) for length in sizes.contexts)]:
        for tree in us:
            engine = bench.engine(bench.grown, tree, batch_size, length + 256)
            fill_batch(engine, 16)
            with torch.inference_mode():
                engine.decoder.state.length.fill_(length)  # an empty cache takes as long to read
            us[tree] = 1e6 * round_seconds(engine, length)
            del engine
        torch.cuda.empty_cache()
        found[kind][at] = {**us, "plain_over_round": us["none"] / us[chain]}
        bench.note()


GROUPS: dict[str, tuple[Part, ...]] = {
    "checks": (checks,),
    "identity": (identity,),
    "rounds": (plain, drafting, scaling),
    "kernels": (kernels, draft_steps),
}
"""Parts that share a process, so that a device fault ends only one group. The most important parts come first."""
