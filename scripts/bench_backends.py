"""Gain of C on this CPU: each piece of a round with it and with torch's operations alone, in turns.

    python scripts/bench_backends.py recipes/quickstart/target
    python scripts/bench_backends.py recipes/quickstart/target --shape 0.4b      # random weights of that shape

The head is an untrained EAGLE-3 head of the quickstart's sizes: time does not depend on weights. Each form runs in a
process of its own, the second without a compiler (`CC=none`), and they take turns. What gives less than 1.3x, or a
twentieth of a round, need not be C.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.command import Parser, count, exit_status
from scripts.grown.shapes import SHAPES

HEAD: dict[str, Any] = dict(depth=4, draft_vocab_size=2048, fc_norm=True, norm_output=True)
PROMPT, LENGTH = 100, 256
FORMS = {"C": None, "torch": "none"}
"""By name, the compiler that a form asks for."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Each piece of a round in C and in torch's operations.")
    parser.add_argument("target", help="a folder or hub id")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="take random weights of that shape")
    parser.add_argument("--repeats", type=count, default=20, help="turns of each form")
    parser.add_argument("--calls", type=count, default=20, help="calls in a turn")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for form, compiler in FORMS.items():
        pipes[form], there = context.Pipe()
        context.Process(target=serve, args=(there, compiler, vars(options)), daemon=True).start()
    names, _ = (pipe.recv() for pipe in pipes.values())
    print(f"{'piece':<32}{'C':>18}{'torch':>20}    ratio of least and of median; microseconds, least and median")
    for name in names:
        seconds: dict[str, list[float]] = {form: [] for form in FORMS}
        for _ in range(options.repeats):
            for form, pipe in pipes.items():
                pipe.send(name)
                seconds[form] += pipe.recv()
        least = {form: min(found) * 1e6 for form, found in seconds.items()}
        median = {form: statistics.median(found) * 1e6 for form, found in seconds.items()}
        figures = "".join(f"{least[form]:>11.1f} {median[form]:>8.1f}" for form in FORMS)
        print(f"{name:<32}{figures}    {least['torch'] / least['C']:.2f} {median['torch'] / median['C']:.2f}")
    return 0


def serve(pipe: Connection, compiler: str | None, options: dict[str, Any]) -> None:
    """Time the pieces that are asked for, until the other end is closed."""
    if compiler:
        os.environ["CC"] = compiler
    import torch

    with torch.inference_mode():
        pieces = open_pieces(options["target"], options["shape"])
        for call in pieces.values():
            call()
        pipe.send(list(pieces))
        while True:
            call = pieces[pipe.recv()]
            pipe.send([call() for _ in range(options["calls"])])


def open_pieces(path: str, shape: str | None) -> dict[str, Callable[[], float]]:
    """By name, a call that returns its seconds."""
    import torch
    from transformers import AutoModelForCausalLM

    from eval.runtime.engine import Engine, EngineOptions, Request
    from eval.runtime.sampling import Sampling
    from heads.registry import build_head
    from heads.target.frozen import FrozenTarget, load_config, load_target
    from heads.tree import ROOT_ONLY, parse_shape

    torch.manual_seed(0)
    if shape is None:
        target = load_target(path, dtype=torch.float32)
    else:
        config = load_config(path)
        config.update(asdict(SHAPES[shape]))
        target = FrozenTarget(AutoModelForCausalLM.from_config(config, dtype=torch.float32), shape)
    narrow = {} if shape else {"intermediate_size": 384}
    head = build_head("eagle3", HEAD | narrow, target, torch.ones(target.vocab_size, dtype=torch.int64)).float()
    pieces: dict[str, Callable[[], float]] = {}
    ids = target.sample(PROMPT, starts=(0,))[0].tolist()
    for tree, temperature in (("none", 0), ("chain:5", 0), ("chain:5", 1), ("tree:5x4x16", 0)):
        own = ROOT_ONLY if tree == "none" else parse_shape(tree)
        engine = Engine(target, None if tree == "none" else head, EngineOptions(shape=own, max_length=LENGTH))
        engine.generate([Request(ids, 2, Sampling(temperature=temperature), ignore_eos=True)])
        for name, call in phases(engine.decoder).items():
            pieces[f"{tree} T={temperature} {name}"] = call
    return pieces


def phases(decoder: Any) -> dict[str, Callable[[], float]]:
    """A round and its phases, each from the same state."""
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
    return {name: lambda name=name: timed(name) for name in (*names, "round")}  # type: ignore[misc]


if __name__ == "__main__":
    sys.exit(exit_status(main))
