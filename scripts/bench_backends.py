"""Measure the gain from C kernels on this CPU: time each piece of a round with the backends `cpu` and `torch` in turns.

    python scripts/bench_backends.py recipes/quickstart/target
    python scripts/bench_backends.py recipes/quickstart/target --shape 0.4b      # random weights of that shape

The heads are untrained and have the sizes of the quickstarts, because time does not depend on weights. A piece whose
gain is less than 1.3x, or less than a twentieth of a round, need not be in C.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.command import Parser, count, exit_status
from scripts.grown.shapes import SHAPES

HEADS: dict[str, dict[str, Any]] = {
    "eagle3": dict(depth=4, draft_vocab_size=2048, fc_norm=True, norm_output=True),
    "dflash2": dict(num_layers=3, selector_rank=64),
    "dspark": dict(num_layers=3, markov_rank=64),
}
DRAFTS = (
    *(("", "none", 0), ("eagle3", "chain:5", 0), ("eagle3", "chain:5", 1), ("eagle3", "tree:5x4x16", 0)),
    *(("dflash2", "chain:7", 0), ("dspark", "chain:7", 0)),
)
PROMPT, LENGTH = 100, 256
BACKENDS = ("cpu", "torch")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Each piece of a round in C and in torch's operations.")
    parser.add_argument("target", help="a folder or hub id")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="take random weights of that shape")
    parser.add_argument("--repeats", type=count, default=20, help="turns of each backend")
    parser.add_argument("--calls", type=count, default=20, help="calls in a turn")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time both backends, and print the ratios."""
    options = parse_arguments(arguments)
    import torch

    print(f"{'piece':<36}{'cpu':>18}{'torch':>20}    ratio of least and of median; microseconds, least and median")
    target, heads = open_heads(options.target, options.shape)
    with torch.inference_mode():
        for name, calls in open_pieces(target, heads).items():
            seconds: dict[str, list[float]] = {backend: [] for backend in calls}
            for call in calls.values():
                call()
            for _ in range(options.repeats):
                for backend, call in calls.items():
                    seconds[backend] += [call() for _ in range(options.calls)]
            least = {backend: min(found) * 1e6 for backend, found in seconds.items()}
            median = {backend: statistics.median(found) * 1e6 for backend, found in seconds.items()}
            figures = "".join(f"{least[backend]:>11.1f} {median[backend]:>8.1f}" for backend in calls)
            print(f"{name:<36}{figures}    {least['torch'] / least['cpu']:.2f} {median['torch'] / median['cpu']:.2f}")
    return 0


def open_heads(path: str, shape: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the target, and new heads for it by kind."""
    import torch
    from transformers import AutoModelForCausalLM

    from heads.registry import build_head
    from heads.target.frozen import FrozenTarget, load_config, load_target

    torch.manual_seed(0)
    if shape is None:
        target = load_target(path, dtype=torch.float32)
    else:
        config = load_config(path)
        config.update(asdict(SHAPES[shape]))
        target = FrozenTarget(AutoModelForCausalLM.from_config(config, dtype=torch.float32), shape)
    narrow = {} if shape else {"intermediate_size": 384}
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    return target, {kind: build_head(kind, own | narrow, target, counts).float() for kind, own in HEADS.items()}


def open_pieces(target: Any, heads: dict[str, Any]) -> dict[str, dict[str, Callable[[], float]]]:
    """Return functions by name and backend. Each runs its piece and returns the seconds."""
    from eval.runtime.engine import Engine, EngineOptions, Request
    from eval.runtime.sampling import Sampling
    from heads.tree import ROOT_ONLY, parse_shape

    pieces: dict[str, dict[str, Callable[[], float]]] = {}
    ids = target.sample(PROMPT, starts=(0,))[0].tolist()
    for kind, tree, temperature in DRAFTS:
        own = ROOT_ONLY if tree == "none" else parse_shape(tree)
        for backend in BACKENDS:
            settings = EngineOptions(shape=own, max_length=LENGTH, backend=backend)
            engine = Engine(target, heads.get(kind), settings)
            engine.generate([Request(ids, 2, Sampling(temperature=temperature), ignore_eos=True)])
            for name, call in phases(engine.decoder).items():
                pieces.setdefault(f"{kind} {tree} T={temperature} {name}".lstrip(), {})[backend] = call
    return pieces


def phases(decoder: Any) -> dict[str, Callable[[], float]]:
    """Return functions that time a round or one of its phases, each from the same state."""
    import torch

    held = [x for x in (*vars(decoder.state).values(), *vars(decoder.head_state or decoder).values())]
    held = [x for x in held if isinstance(x, torch.Tensor)]
    decoder.state.done.fill_(False)
    decoder.state.limit.fill_(LENGTH)
    before = [x.clone() for x in held]

    def timed(phase: str) -> float:
        for x, old in zip(held, before, strict=True):
            x.copy_(old)
        spans: dict[str, float] = {}
        last = started = time.perf_counter()

        def mark(name: str) -> None:
            nonlocal last
            spans[name], last = time.perf_counter() - last, time.perf_counter()

        decoder.round(LENGTH, mark)
        return spans.get(phase, time.perf_counter() - started)

    names = ("draft", "verify", "accept", "commit") if decoder.head is not None else ("verify", "commit")
    return {name: partial(timed, name) for name in (*names, "round")}


if __name__ == "__main__":
    sys.exit(exit_status(main))
