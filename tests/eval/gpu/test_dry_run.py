"""The GPU suite's parts with every kernel on, in Triton's interpreter: what a first run on a card would trip over."""

import importlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.gpu import checks, idle, parts, suite
from eval.gpu.models import Models
from eval.runtime.request import Request
from eval.runtime.sampling import Sampling
from heads.backends.triton.timing import device_seconds
from scripts.model_shapes import SHAPES, ModelShape

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite itself runs"),
]
CPU = torch.device("cpu")
PARTS = {part.__name__: part for group in parts.GROUPS.values() for part in group}


def few_requests(count: int, tokens: int, new_tokens: int, temperature: float = 0.0) -> list[Request]:
    """At most two, of small ids."""
    count = min(count, 2)
    ways = [Sampling(temperature, seed=i) if temperature else Sampling() for i in range(count)]
    return [
        Request([3 + (5 * i + j) % 90 for j in range(tokens)], new_tokens, way, (), True) for i, way in enumerate(ways)
    ]


@pytest.fixture(scope="module")
def bench() -> Iterator[parts.Bench]:
    """One small size of everything."""
    sizes = dict(
        NEW=3, PROMPT=6, LONG=3, LENGTH=70, CONTEXT=16, VERIFIED=(4,), BATCHES=(2,), CONTEXTS=(20,), ROWS=(1, 16)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heads.backends.triton.runtime.ON_CPU", True)
        for name in (
            "heads.backends.cpu.draws",
            "heads.backends.cpu.commit",
            "heads.backends.cpu.recurrent",
            "heads.backends.cpu.stack",
        ):
            patch.setattr(importlib.import_module(name), "load", lambda: None)
        for size, value in dict(hidden_size=64, intermediate_size=64, vocab_size=128, num_attention_heads=4).items():
            patch.setitem(checks.SHAPE, size, value)
        patch.setitem(SHAPES, "small", ModelShape(64, 2, 4, 2, 16, 64, 300))
        for size, number in sizes.items():
            patch.setattr(parts, size, number)
        patch.setattr(parts, "TREES", ("chain:2", "tree:2x2x5"))
        patch.setattr(parts, "code_requests", few_requests)
        for name in ("eval.benchmark.roofline", "eval.gpu.kernels", "eval.gpu.drafts"):
            patch.setattr(importlib.import_module(name), "device_seconds", partial(device_seconds, repeats=1))
        patch.setattr("eval.benchmark.roofline.COPY_BYTES", {"cpu": 1 << 12})
        patch.setattr("eval.benchmark.roofline.TRIES", {"cpu": 1})
        patch.setattr("eval.gpu.kernels.COLD", 1 << 10)
        made = parts.Bench(CPU, "small", None, time.monotonic() + 3600, prompts=1, timed_prompts=1)
        target = checks.make_target("llama", torch.bfloat16, CPU)
        made.__dict__["small"] = made.__dict__["grown"] = Models(target, checks.make_head(target), {})  # type: ignore[arg-type]
        yield made


@pytest.mark.parametrize("name", ["plain", "drafting", "scaling", "kernels", "draft_steps"])
def test_a_part_runs_through(name: str, bench: parts.Bench) -> None:
    found: dict[str, Any] = {}
    suite.run_part(PARTS[name], bench, found)
    assert not suite.failed(found), found
    numbers = json.loads(json.dumps(found))
    if name == "kernels":
        timed = {part["part"].split(",")[0].split(" by ")[0] for part in numbers["16"]}
        assert {
            "qkv",
            "choose with noise",
            "tree_attention strict at 70",
            "compact 7",
            "take_path 7",
            "settle",
        } <= timed
    if name == "drafting":
        assert numbers["tree:2x2x5"]["glue_us"] > 0


def test_chains_are_the_references_bit_for_bit(bench: parts.Bench) -> None:
    """What the part `identity` does with each of its settings."""
    found = parts.compare(bench.engine(bench.small, "chain:2"), few_requests(2, 6, 4, 1.0))
    assert found["identical"] == found["prompts"] == 2 and found["flips"] == 0


def test_idle_is_read_from_the_profilers_events(bench: parts.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up ones: three kernels a round."""
    seen = SimpleNamespace(
        events=lambda: [
            SimpleNamespace(device_type=SimpleNamespace(name=kind), time_range=SimpleNamespace(start=at, end=at + 1))
            for at in range(2, 2 + 2 * 3 * 2, 2)
            for kind in ("CUDA", "CPU")
        ]
    )

    @contextmanager
    def profile(activities: Any) -> Iterator[Any]:
        yield seen

    monkeypatch.setattr(idle, "profile", profile)
    monkeypatch.setattr(idle, "COUNT", 2)
    found: dict[str, Any] = {}
    suite.run_part(PARTS["idle"], bench, found)
    assert found["none"] == {"kernels": 3, "round_us": 5, "idle_share": pytest.approx(0.4), "gap_us": 1}
    assert set(found) == {"none", *parts.TREES}
