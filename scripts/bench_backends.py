"""The products of a CPU in whole rounds: C, oneDNN and torch, with weights in float32 and in bfloat16, taken in turns.

    python scripts/bench_backends.py runs/quickstart
    OMP_NUM_THREADS=2 python scripts/bench_backends.py HEAD --target TARGET --out record.json

Each variant decodes the same prompts plainly, with a chain and with a tree, greedily and at T = 1, in rounds of the
engine with its products; the variants take turns, and the one that goes first rotates. A cell is the median time of a
round, and in brackets the median over turns of its ratio to the variant `torch float32`. C stays in this project where
it makes a whole round at least 1.3 times as fast as the best variant without it.

`bfloat16` under C means weights stored in bfloat16 and multiplied in float32, as it does by itself with weights that
were published so; under torch it means that the whole model computes in bfloat16.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from eval.measure.command import Parser, add_head_options, exit_status, typed
from eval.measure.settings import Count, Trees, add_prompt_options, to_settings

VARIANTS = (("torch", "float32"), ("torch", "bfloat16"), ("oneDNN", "float32"), ("C", "float32"), ("C", "bfloat16"))
TEMPERATURES = (0.0, 1.0)
BASE, NEEDED = "torch float32", 1.3


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Whole rounds with each product of a CPU.")
    add_head_options(parser)
    parser.add_argument(
        "--tree", dest="trees", type=typed(Trees), default="chain:5,tree:5x6x16", help="drafts to measure"
    )
    parser.add_argument("--repeats", type=typed(Count), default=3, help="times that each variant decodes each prompt")
    add_prompt_options(parser, num_prompts=4, max_prompt_tokens=256, max_new_tokens=48)
    return parser.parse_args(arguments)


@contextmanager
def only(product: str) -> Iterator[None]:
    """Let products that are built inside be those of one kind."""
    from heads.targets import decoder
    from heads.targets import product as products

    kept = products.load, products._has_onednn
    decoder._made.clear()
    if product != "C":
        products.load = lambda: None  # type: ignore[assignment]
    if product == "torch":
        products._has_onednn = lambda: False
    try:
        yield
    finally:
        products.load, products._has_onednn = kept


def open_engines(product: str, dtype: str, options: argparse.Namespace, length: int) -> dict[str, Any]:
    """Return the engines of one variant by the names of their drafts."""
    import torch

    from eval.measure.command import draft_shapes
    from eval.measure.loading import fitting_head, open_target_of
    from eval.runtime.engine import Engine, EngineOptions

    options.dtype = dtype if product == "torch" else "float32"
    target, _ = open_target_of(options.head, options)
    if product == "C" and dtype == "float32":  # weights that bfloat16 holds exactly would be stored in it
        with torch.no_grad():
            for parameter in target.model.parameters():
                parameter.mul_(1 + 2.0**-12)
    head, engines = fitting_head(options.head, target), {}
    with only(product):
        engines["plain"] = Engine(target, None, EngineOptions(max_length=length))
        for shape in draft_shapes(options.trees, head):
            engines[str(shape)] = Engine(target, head, EngineOptions(shape=shape, max_length=length))
    return engines


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.measure.command import draft_shapes
    from eval.measure.environment import machine, target_facts
    from eval.measure.loading import choose_prompts, open_target_of
    from eval.measure.results import write_record
    from eval.runtime.engine import Request
    from eval.runtime.sampling_params import Sampling
    from heads.core.errors import UserError
    from heads.targets.product import load

    options.device = "cpu"
    if load() is None:
        raise UserError("no C compiler was found, and the products in C are what is compared; install one")
    target, tokenizer = open_target_of(options.head, options)
    nodes = max(shape.nodes for shape in draft_shapes(options.trees))
    prompts = choose_prompts(target, tokenizer, to_settings(options), nodes)
    length = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens + nodes
    variants = {" ".join(each): open_engines(*each, options, length) for each in VARIANTS}
    names = list(variants)
    cells = [(draft, temperature) for draft in variants[BASE] for temperature in TEMPERATURES]
    times: dict[Any, dict[str, list[float]]] = {cell: {name: [] for name in names} for cell in cells}
    for repeat in range(-1, options.repeats):  # the first one warms up
        for i, prompt in enumerate(prompts[: 1 if repeat < 0 else None]):
            for draft, temperature in cells:
                request = Request(prompt.ids, options.max_new_tokens, Sampling(temperature, seed=i), ignore_eos=True)
                first = (repeat + i) % len(names)
                for name in names[first:] + names[:first]:
                    engine = variants[name][draft]
                    engine.generate([request])
                    if repeat >= 0:
                        times[draft, temperature][name].append(engine.timings.decode_seconds / engine.timings.rounds)
    record = []
    for cell, found in times.items():
        base = found[BASE]
        for name, own in found.items():
            ratio = median(b / a for a, b in zip(own, base, strict=True))
            record.append({"draft": cell[0], "temperature": cell[1], "product": name, "ms": 1e3 * median(own)})
            record[-1] |= {"times_as_fast_as_torch": ratio, "turns_ms": [1e3 * seconds for seconds in own]}
    print(f"{'ms a round (x torch)':22}" + "".join(f"{f'{draft}, T = {T:g}':>22}" for draft, T in cells))
    for name in names:
        row = [fact for fact in record if fact["product"] == name]
        print(f"{name:22}" + "".join(f"{fact['ms']:13.2f} ({fact['times_as_fast_as_torch']:5.2f})" for fact in row))
    gains = {}
    for (draft, T), found in times.items():
        middle = {name: median(own) for name, own in found.items()}
        best = [min(middle[name] for name in names if name.startswith("C ") is in_c) for in_c in (False, True)]
        gains[f"{draft}, T = {T:g}"] = best[0] / best[1]
        print(f"C against the best without it, {draft}, T = {T:g}: {best[0] / best[1]:.2f}, needed {NEEDED}")
    if options.out:
        facts = {"target": target_facts(target), "head": options.head, **machine(target.device)}
        write_record({**facts, "rounds": record, "gain_of_c": gains}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
