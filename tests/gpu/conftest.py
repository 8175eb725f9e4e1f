"""Sizes and the record of the tests that need a card. `scripts/gpu_check.py` runs them and keeps their figures.

With GPU_CHECK_SMALL they run at tiny sizes on a CPU, in Triton's interpreter, in float32.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.measure.machine import machine
from eval.runtime.engine import Engine
from heads.targets.frozen_target import FrozenTarget
from tests.support.switches import kernels_on_cpu

Note = Callable[..., None]
"""Record the figures of one fact by its name, and fail if `ok` is False."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the random models, by the names of transformers' configs, and of the work."""

    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 14_336
    vocab_size: int = 128_256
    layers: int = 32  # of the model that is timed; that of the texts has four
    slots: int = 5120  # of the cache that kernels read: they cross the kernel's splits, and the chunks of splits
    nodes: tuple[int, ...] = (1, 6, 32, 64)
    trees: tuple[str, ...] = ("chain:5", "tree:6x8x32")
    texts: int = 8
    prompt: int = 64
    tokens: int = 128
    buffer: int = 1 << 31  # elements of the tensor that measures the bandwidth


SMALL = Sizes(64, 4, 2, 16, 96, 300, 4, 1100, (6,), ("chain:2", "tree:2x2x4"), 1, 8, 8, 1 << 22)


@pytest.fixture(scope="session")
def sizes() -> Sizes:
    return SMALL if os.environ.get("GPU_CHECK_SMALL") else Sizes()


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    if torch.cuda.is_available():
        yield torch.device("cuda")
    elif os.environ.get("GPU_CHECK_SMALL"):
        with kernels_on_cpu():
            yield torch.device("cpu")
    else:
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32  # the interpreter multiplies no bfloat16


@pytest.fixture(scope="module")
def note(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Note]:
    """Collect a file's facts. With GPU_CHECK_OUT, they are added to that JSON file under the test file's name."""
    started = time.perf_counter()
    found: dict[str, Any] = {}
    torch.manual_seed(0)

    def note(name: str, *, ok: bool = True, **figures: Any) -> None:
        found[name] = figures | {"ok": ok}
        assert ok, f"{name}: {figures}"

    with torch.no_grad():
        yield note
    if out := os.environ.get("GPU_CHECK_OUT"):
        record = json.loads(Path(out).read_text()) if Path(out).is_file() else {}
        minutes = (time.perf_counter() - started) / 60
        record[request.path.stem.removeprefix("test_")] = {**machine(device), "minutes": minutes, "found": found}
        Path(out).write_text(json.dumps(record, indent=1) + "\n")


def random_target(
    family: str, layers: int, sizes: Sizes, device: torch.device, dtype: torch.dtype, **more: Any
) -> FrozenTarget:
    shape: dict[str, Any] = {name: value for name, value in vars(sizes).items() if "size" in name or "head" in name}
    shape |= {"num_hidden_layers": layers, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    config = AutoConfig.for_model(family, **shape, **more, eos_token_id=0, pad_token_id=0)
    auto: Any = AutoModelForCausalLM
    with device:
        return FrozenTarget(auto.from_config(config, dtype=dtype), family)


def forms(engine: Engine) -> dict[str, bool]:
    """Return whether an engine runs its kernels and its CUDA graphs. Both are expected on a card."""
    target, has_graphs = engine.decoder.target, engine.rounds.capture is not None
    kernels = not target.reads_masks and target.in_tiles
    return {"kernels": kernels, "graphs": has_graphs, "ok": kernels and (has_graphs or engine.on_host)}


def prompt(sizes: Sizes, number: int = 0) -> list[int]:
    return [3 + (37 * number + 11 * j) % (sizes.vocab_size - 3) for j in range(sizes.prompt)]
