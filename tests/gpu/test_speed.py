"""Steps, rounds and their phases of an 8B model against the card's bandwidth, with transformers' generate for
comparison."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.measure.roofline import phase_seconds
from eval.runtime.engine import Engine, EngineOptions, Request
from heads.core.tree import parse_shape
from heads.registry import build_head
from heads.targets.frozen_target import FrozenTarget
from heads.targets.quantization import weight_bytes
from tests.gpu.conftest import Note, Sizes, forms, prompt, random_target

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
    return random_target("llama", sizes.layers, sizes, device, dtype)


@pytest.fixture(scope="module")
def plain_seconds(target: FrozenTarget, sizes: Sizes) -> float:
    length = sizes.prompt + sizes.tokens + 1
    return fastest_round(Engine(target, None, EngineOptions(max_length=length)), sizes)[0]


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of `work`, until the device has finished."""
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def fastest_round(engine: Engine, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds of a round, the best of three texts, and tau."""
    best = float("inf")
    for _ in range(3):
        (output,) = engine.generate([Request(prompt(sizes), sizes.tokens, ignore_eos=True)])
        best = min(best, engine.timings.decode_seconds / engine.timings.rounds)
    return best, output.decoded / output.rounds


def test_plain_steps(
    target: FrozenTarget, plain_seconds: float, sizes: Sizes, device: torch.device, dtype: torch.dtype, note: Note
) -> None:
    buffer = torch.randn(sizes.buffer, device=device, dtype=dtype)
    bandwidth = buffer.nbytes / min(seconds(buffer.sum, device) for _ in range(10))
    read = weight_bytes(target.model) - sizes.vocab_size * sizes.hidden_size * dtype.itemsize  # no embeddings
    share = read / bandwidth / plain_seconds
    note("plain", ms=1e3 * plain_seconds, read_bandwidth=bandwidth, bytes_of_a_step=read, share_of_bandwidth=share)


def test_rounds_and_their_phases(
    target: FrozenTarget, plain_seconds: float, sizes: Sizes, device: torch.device, dtype: torch.dtype, note: Note
) -> None:
    head: Any = build_head("eagle3", {"aux_layer_ids": [1, 2, 3]}, target, torch.ones(sizes.vocab_size).long())
    head = head.to(device=device, dtype=dtype).eval()
    for tree in sizes.trees:
        shape = parse_shape(tree)
        engine = Engine(target, head, EngineOptions(shape=shape, max_length=sizes.prompt + sizes.tokens + shape.nodes))
        best, tau = fastest_round(engine, sizes)
        phases = {
            phase: 1e3 * spent for phase, spent in phase_seconds(engine, engine.decoder.target.spec.capacity).items()
        }
        speed = {"ms": 1e3 * best, "over_plain": best / plain_seconds, "tau": tau, "tokens_per_second": tau / best}
        note(tree, **speed, phases_ms=phases, **forms(engine))


@pytest.mark.parametrize("cache", ["dynamic", "static"])  # with a static one transformers compiles its forward pass
def test_transformers_generate(
    cache: str, target: FrozenTarget, plain_seconds: float, sizes: Sizes, device: torch.device, note: Note
) -> None:
    generate: Any = target.model.generate
    ids = torch.tensor([prompt(sizes)], device=device)

    def run(count: int) -> float:
        given: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "cache_implementation": cache}
        return seconds(lambda: generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **given), device)

    try:
        run(sizes.tokens)
        step = (min(run(sizes.tokens) for _ in range(2)) - min(run(2) for _ in range(2))) / (sizes.tokens - 2)
    except Exception as error:  # a baseline that fails is recorded, and no fault of ours
        note(f"generate, {cache} cache", failed=f"{type(error).__name__}: {error}"[:200])
    else:
        note(f"generate, {cache} cache", ms=1e3 * step, over_plain=step / plain_seconds, tokens_per_second=1 / step)
