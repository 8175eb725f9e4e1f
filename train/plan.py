"""The option `--plan` of the training entries: a run's memory, operations and hours, without its weights and data."""

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eval.measure.command import Parser, typed
from eval.measure.prompts import split_prompts, spread
from eval.measure.settings import Count
from eval.pages.format import count as short
from eval.pages.format import number, plural, with_interval
from heads.methods.recycling import total_memory
from train.accelerator import wanted_mode
from train.counting import HeadCount, TargetCount, count_run
from train.fast_dtype import fastest_dtype, measured_tflops
from train.open_run import read_recipe
from train.recipe import Recipe, check_kind, with_steps
from train.step import rows_per_step

GIB = 2**30
H100 = 0.4 * 989
"""TFLOP/s of a GPU: 40% of an H100's dense peak in bfloat16, by its data sheet."""
H100_BANDWIDTH = 0.6 * 3.35e12
"""Bytes/s at which a GPU reads weights: 60% of an H100's, by its data sheet."""
LARGE = 2048
"""Maximum rows and width of the product that is timed on a CPU."""
DECODING_WIDTH = 4096
"""Width of the product that is timed for decoding, which reads weights that no cache holds."""
CURVES = Path(__file__).parents[1] / "eval/results/curves"
"""Recorded learning curves, a JSON file each: `method` (a kind of head), `target` and `points` (`tokens`, `tau` and
`ci95`)."""
MAX_EXAMPLES = 4
"""Points of a recorded curve that a plan names."""
SHARINGS = {
    "ddp": "buckets of gradients",
    "fsdp": "gathered weights",
    "zero2": "working copy of the head",
    "zero3": "gathered weights",
}
"""Ways to share the head's training state between processes, each with the copy that every process of several holds
in addition to its part."""
STATE = ("head, float32", "gradients, float32", "optimizer")
"""Rows of the plan that are sharded over the processes. With ddp, each process holds all of them."""
FEATURES = ("process", "sharded", "vllm", "cache")
"""Places of the target: whole in each process, its layers sharded over the processes, on a server, or in a filled
folder. In the last two cases a process holds only the embeddings, the final norm and the output head."""


@dataclass(frozen=True)
class Launch:
    processes: int = 1
    sharing: str = "ddp"
    features: str = "process"
    memory: float | None = None
    """Memory of a GPU in GiB. None: plan for this machine's device."""

    @property
    def device(self) -> str:
        return "cuda" if self.memory is not None or torch.cuda.is_available() else "cpu"

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of one device. On a CPU: all memory of this machine."""
        return total_memory(torch.device(self.device)) if self.memory is None else round(self.memory * GIB)

    def bf16(self, precision: str) -> bool:
        if precision != "auto":
            return precision == "bf16"
        return self.memory is not None or fastest_dtype(torch.device(self.device)) == torch.bfloat16


class Plan:
    """The counts of a recipe, and the resources that follow from them for a launch."""

    target: TargetCount
    head: HeadCount

    def __init__(self, recipe: Recipe, launch: Launch) -> None:
        self.recipe, self.launch = recipe, launch
        self.bf16 = launch.bf16(recipe.train.precision)
        length = recipe.data.context_length
        rows = rows_per_step(recipe.train, length, launch.processes)
        self.step_tokens = rows * length
        """Tokens of one optimizer step over all processes."""
        passes = rows // (recipe.train.batch_size * launch.processes)
        self.target, self.head = count_run(recipe, launch.device, launch.memory_bytes, passes, bf16=self.bf16)

    @cached_property
    def device(self) -> dict[str, int]:
        """The bytes on one device, by row of the plan."""
        head, target, launch = self.head, self.target, self.launch
        parts = 1 if launch.sharing == "ddp" else launch.processes
        shared_layers = target.layer_bytes if launch.processes > 1 else 0
        rows = {
            "target": {
                "process": target.bytes,
                "sharded": -(-target.bytes // launch.processes) + shared_layers,
            }.get(launch.features, target.end_bytes)
        }
        for name, size in zip(STATE, (head.bytes, head.gradients, head.optimizer), strict=True):
            rows[name] = -(-size // parts)
        if launch.processes > 1:
            copies = head.gradients if launch.sharing == "ddp" else head.bytes // (1 + self.bf16)
            rows[SHARINGS[launch.sharing]] = copies
        rows["the head as it is measured"] = head.copy_bytes
        computed = target.activations if launch.features in ("process", "sharded") else 0
        rows["activations of a micro-batch"] = max(head.activations, computed)
        return rows

    @cached_property
    def steps(self) -> int | None:
        """Optimizer steps, at most, or None if only the data determine them."""
        train, made = self.recipe.train, self.recipe.data.regenerate
        if train.epochs is None:
            return train.steps
        if made is None or made.share < 1 or self.prompts is None:
            return None
        return math.ceil(train.epochs * self.prompts * (made.prompt_tokens + made.new_tokens) / self.step_tokens)

    @cached_property
    def prompts(self) -> int | None:
        """Prompts that the target answers before the training, or None if there are none or only the data determine
        their number."""
        made, limits = self.recipe.data.regenerate, [source.limit for source in self.recipe.data.sources]
        if made is None or (made.prompts is None and None in limits):
            return None
        return made.prompts or sum(limit or 0 for limit in limits)

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.step_tokens

    def flops_per_token(self) -> tuple[float, float]:
        """Return the operations per token of the target's forward pass and of the head's step, on these devices."""
        elsewhere = self.launch.features in ("vllm", "cache")
        return 0.0 if elsewhere else float(self.target.flops), self.head.flops

    def tflops(self) -> float:
        """Return the TFLOP/s of one device: `H100` of a GPU; of a CPU, which all processes share, what a product of a
        micro-batch reaches here."""
        if self.launch.device == "cuda":
            return H100
        rows = self.recipe.train.batch_size * self.recipe.data.context_length
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        return measured_tflops(dtype, min(rows, LARGE), min(self.head.hidden_size, LARGE)) * self._share_of_cores()

    def _share_of_cores(self) -> float:
        return min(1.0, len(os.sched_getaffinity(0)) / (self.launch.processes * torch.get_num_threads()))

    def decoding_hours(self, prompts: int, new_tokens: int, batch_size: int) -> float:
        """Return the hours in which the target answers so many prompts on these devices, without the prompts' own
        passes. A step of a batch takes a GPU the time to read the weights, or to compute; of a CPU, what a product of
        so many rows with a large matrix reaches here."""
        flops = 2.0 * self.target.active * batch_size
        if self.launch.device == "cuda":
            seconds = max(self.target.bytes / H100_BANDWIDTH, flops / (H100 * 1e12))
        else:
            seconds = flops / (1e12 * measured_tflops(torch.float32, batch_size, DECODING_WIDTH))
            seconds /= self._share_of_cores()
        return prompts * new_tokens / batch_size * seconds / 3600 / self.launch.processes

    def hours(self, tflops: float, tokens: float | None = None) -> float:
        """Return the hours of all steps, or of so many tokens, if each device computes at `tflops` TFLOP/s."""
        tokens = tokens or self.tokens or 0
        return tokens * sum(self.flops_per_token()) / (tflops * 1e12 * self.launch.processes) / 3600

    def advice(self) -> Iterator[tuple[str, int]]:
        """Yield changes that save memory, each with the bytes on one device after this change alone."""
        target, launch, train, length = self.target, self.launch, self.recipe.train, self.recipe.data.context_length
        whole, activations = sum(self.device.values()), self.device["activations of a micro-batch"]
        others = whole - self.device["target"]
        if train.batch_size > 1:
            more = "" if train.tokens_per_step else f" train.grad_accum={train.grad_accum * train.batch_size}"
            left = whole - activations + activations // train.batch_size
            yield f"train.batch_size=1{more}, the same step", left
        else:
            yield f"data.context_length={length // 2}", whole - activations // 2
        if launch.features == "process":
            if target.int8_bytes is not None and target.int8_bytes < target.bytes:
                yield "target.quantize=int8", others + target.int8_bytes
            if (room := launch.memory_bytes - others - target.layer_bytes) > 0:
                needed = max(2, math.ceil(target.bytes / room), launch.processes)
                text = f"the target's layers divided among {needed} processes (--features sharded --processes {needed})"
                yield text, others - (-target.bytes // needed) + target.layer_bytes
            yield "the target on a server (--features vllm)", others + target.end_bytes
        if launch.processes > 1 and launch.sharing == "ddp":
            state = sum(self.device[name] for name in STATE)
            yield "the head's state divided (--sharing fsdp)", whole - state + state // launch.processes


def plan(arguments: Sequence[str], name: str) -> int:
    """Print the plan of a recipe for train/NAME.py. The exit status is 0, whether the run fits or not."""
    options = parse_arguments(arguments)
    recipe = read_recipe([options.recipe, *options.overrides])
    check_kind(recipe, options.recipe, name)
    print_plan(Plan(recipe, launch_of(options, recipe)), options)
    return 0


def launch_of(options: argparse.Namespace, recipe: Recipe) -> Launch:
    return Launch(options.processes, options.sharing, options.features or recipe.features.kind, options.memory)


def print_plan(made: Plan, options: argparse.Namespace) -> None:
    text = "\n".join(lines(made, options.tflops or [made.tflops()]))
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the recipe, its overrides, and the options of a plan. The sharing is by default that of the launch."""
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    launched = ("zero3" if stage == "3" else "zero2") if wanted_mode() == "deepspeed" else wanted_mode()
    parser = Parser("Plan a run.")
    add: Any = parser.add_argument
    add("recipe")
    add("overrides", nargs="*")
    add("--plan", action="store_true")
    add("--processes", type=typed(Count), default=int(os.environ.get("WORLD_SIZE", "1")))
    add("--sharing", choices=list(SHARINGS), default=launched)
    add("--features", choices=FEATURES)
    add("--memory", type=_positive)
    add("--tflops", type=_positive, action="append")
    options, others = parser.parse_known_intermixed_args(list(arguments))
    for word in others:  # --key=value is key=value
        if not word.startswith("--") or "=" not in word:
            parser.error(f"unrecognized arguments: {word}")
    options.overrides += others
    return options


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def lines(made: Plan, rates: Sequence[float]) -> Iterator[str]:
    """Yield the plan as lines of text. `rates`: speeds of a device in TFLOP/s, each for an estimate of the hours."""
    recipe, launch, head, target = made.recipe, made.launch, made.head, made.target
    train, tokens = recipe.train, made.tokens
    whole, memory = sum(made.device.values()), launch.memory_bytes
    by_target, by_head = made.flops_per_token()
    yield (
        f"{recipe.head.kind} for {recipe.target.path}: {plural(launch.processes, 'device')} ({launch.sharing}), "
        f"target: {launch.features}; {train.batch_size} x {recipe.data.context_length} tokens a micro-batch, "
        f"{'bfloat16' if made.bf16 else 'float32'} products"
    )
    if head.unserved is not None:
        yield head.unserved
    yield "parameters"
    yield _row("target", short(target.total))
    yield _row("target, active for a token", short(target.active))
    yield _row("head, trained", short(head.trained))
    yield f"{'memory of each device':44}{'GiB':>12}"
    names = {"target": f"target, {target.dtype}", "optimizer": f"optimizer, {train.optimizer}"}
    for name, size in made.device.items():
        yield _gib(names.get(name, name), size)
    yield _gib("  of these, the target's features", head.features)
    yield _gib("whole", whole)
    yield _gib("the device's memory", memory)
    yield "the run"
    yield _row("tokens a step", f"{made.step_tokens:,}")
    if train.epochs is not None:
        yield _row("epochs of the data", f"{train.epochs:g}")
    if made.steps is not None and tokens is not None:
        most = "" if train.epochs is None else ", at most"
        yield _row(f"steps{most}", f"{made.steps:,}")
        yield _row(f"tokens{most}", short(tokens))
    yield _row("GFLOP a token, target", f"{by_target / 1e9:.3g}")
    yield _row("GFLOP a token, head, at most", f"{by_head / 1e9:.3g}")
    if tokens is not None:
        yield _row("FLOP", f"{tokens * (by_target + by_head):.1e}")
    for rate in rates:
        hours = made.hours(rate, None if tokens is not None else 1e9)
        what = "hours at" if tokens is not None else "10^9 tokens: hours at"
        name = f"{what} {number(rate, 0 if rate >= 10 else 2)} TFLOP/s a device"
        yield _row(name, number(hours, 1 if hours >= 1 else 3))
    answers = recipe.data.regenerate
    if answers is not None and answers.server is None and made.prompts is not None:
        hours = made.decoding_hours(made.prompts, answers.new_tokens, answers.batch_size)
        yield _row("hours of the answers before, an estimate", number(hours, 1 if hours >= 1 else 3))
    if made.steps is not None:
        points = len(with_steps(recipe, made.steps).train.measured_steps)
        prompts = points * recipe.eval.num_prompts * len(split_prompts(recipe.eval.prompts))
        hours = made.decoding_hours(prompts, recipe.eval.max_new_tokens, recipe.eval.batch_size)
        yield _row(f"hours of {plural(points, 'measurement')}, an estimate", number(hours, 1 if hours >= 1 else 3))
    for file in sorted(CURVES.glob("*.json")):
        record = json.loads(file.read_bytes())
        if record["method"] == recipe.head.kind:
            shown = [
                f"{with_interval(point['tau'], point['ci95'])} after {short(point['tokens'])} tokens"
                for point in reversed(spread(record["points"][::-1], MAX_EXAMPLES))
            ]
            yield f"measured elsewhere, no promise: {record['method']} on {record['target']}, tau {', '.join(shown)}"
    if whole <= memory:
        yield f"fits: {number((memory - whole) / GIB)} GiB of each device are left"
        return
    yield f"does not fit: {number((whole - memory) / GIB)} GiB too much on each device. Each by itself gives"
    for text, left in made.advice():
        yield f"  {number(left / GIB):>8} GiB, {'fits' if left <= memory else 'too much'}: {text}"


def _row(name: str, value: str) -> str:
    return f"  {name:42}{value:>12}"


def _gib(name: str, size: float) -> str:
    return _row(name, number(size / GIB, 2 if size >= 2**27 else 4))
