"""The option `--plan` of the training entries: a run's memory, operations and hours, without its weights and data."""

import argparse
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from eval.data.prompts import split_prompts, spread
from eval.measure.machine import busy_cores
from eval.pages.texts import count as short
from eval.pages.texts import number, plural, with_interval
from eval.records.result_folders import short_name
from eval.records.results import read_results
from heads.core.engines import ALL_ENGINES
from heads.core.errors import UserError
from heads.formats.engine_folder import Verdict, why_unserved
from heads.targets.quantization import MIN_SHARE
from train.plan.memory_and_flops import ACTIVATIONS, GIB, STATE, Launch, Plan
from train.recipe.recipe import Recipe, with_steps
from train.run.checks import check_fit, check_places
from train.run.open_run import ALONE
from train.steps.accelerate_launch import wanted_mode
from train.steps.fast_dtype import measured_tflops

H100 = 0.4 * 989
"""TFLOP/s of a GPU: 40% of an H100's dense peak in bfloat16, by its data sheet."""
H100_BANDWIDTH = 0.6 * 3.35e12
"""Bytes/s at which a GPU reads weights: 60% of an H100's, by its data sheet."""
MAX_PRODUCT = 2048
"""Maximum rows and width of the product that is timed on a CPU."""
DECODING_WIDTH = 4096
"""Width of the product that is timed for decoding, which reads weights that no cache holds."""
CURVES = Path(__file__).parents[2] / "eval/results/smollm2-long"
"""Records of heads with their learning curves."""
MAX_EXAMPLES = 4
"""Points of a recorded curve that a plan names."""


def launch_of(options: argparse.Namespace, recipe: Recipe) -> Launch:
    """Return the launch that the options of a plan describe, by default the one that has started this process."""
    sharing = wanted_mode()
    if sharing == "deepspeed":
        sharing = "zero3" if os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3" else "zero2"
    processes = options.processes or int(os.environ.get("WORLD_SIZE", "1"))
    return Launch(processes, options.sharing or sharing, options.features or recipe.features.kind, options.memory)


def print_plan(plan: Plan, tflops: list[float] | None) -> None:
    """Print a plan. `tflops`: speeds of a device, each for an estimate of the hours; None: that of this machine.
    UserError, in its words, if the run would be refused."""
    check_places(plan.recipe)
    check_fit(plan.recipe, plan.target, plan.head)
    if plan.launch.features == "sharded" and plan.launch.processes == 1:
        raise UserError(ALONE)
    text = "\n".join(plan_lines(plan, tflops))
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def plan_lines(plan: Plan, tflops: list[float] | None) -> Iterator[str]:
    used = busy_cores(torch.device(plan.launch.device))
    rates = tflops or [device_tflops(plan, is_busy=used is not None)]
    recipe = plan.recipe
    launch = plan.launch
    train = plan.recipe.train
    tokens_per_batch = f"{train.batch_size} x {recipe.data.context_length} tokens a micro-batch"
    yield (
        f"{recipe.head.kind} for {recipe.target.path}: {plural(launch.processes, 'device')} ({launch.sharing}), "
        f"target: {launch.features}; {tokens_per_batch}, {'bfloat16' if plan.bf16 else 'float32'} products"
    )
    yield served_line(plan.verdicts)
    yield "parameters"
    yield _row("target", short(plan.parameters))
    yield _row("target, active for a token", short(plan.active))
    yield _row("head, trained", short(sum(p.numel() for p in plan.trained)))
    yield f"{'memory of each device':44}{'GiB':>12}"
    quantized = f", {recipe.target.quantize} layers" if recipe.target.quantize else ""
    dtype = str(plan.target.dtype).removeprefix("torch.") + quantized
    names = {"target": f"target, {dtype}", "optimizer": f"optimizer, {launch.optimizer(train.optimizer)}"}
    device = plan.device()
    memory = launch.memory_bytes
    total = sum(device.values())
    sizes = {names.get(name, name): size for name, size in device.items()}
    sizes |= {"  of these, the target's features": plan.features_bytes, "whole": total, "the device's memory": memory}
    for name, size in sizes.items():
        yield _row(name, number(size / GIB, 2 if size >= 2**27 else 4))
    yield from disk_lines(plan)
    yield from run_lines(plan, rates, used)
    for file in sorted(CURVES.glob("*.json")):
        record = read_results(file)
        for curve in (head.curve for head in record.heads if head.kind == recipe.head.kind):
            points = [
                f"{with_interval(point.tau, point.ci95)} after {short(point.tokens)} tokens"
                for point in reversed(spread(curve[::-1], MAX_EXAMPLES))
            ]
            target = short_name(record.target.name)
            yield f"measured elsewhere, no promise: {recipe.head.kind} on {target}, tau {', '.join(points)}"
    if total <= memory:
        yield f"fits: {number((memory - total) / GIB)} GiB of each device are left"
        return
    yield f"does not fit: {number((total - memory) / GIB)} GiB too much on each device. Each by itself gives"
    for text, size in advice(plan):
        yield f"  {number(size / GIB):>8} GiB, {'fits' if size <= memory else 'too much'}: {text}"


def served_line(verdicts: Sequence[Verdict]) -> str:
    """Return which engines will serve the head, and why the others will not."""
    if unserved := why_unserved(verdicts):
        return unserved
    engines = [verdict for verdict in verdicts if verdict.reader in ALL_ENGINES]
    served = ", ".join(verdict.reader for verdict in engines if verdict.serves)
    others = [f"{verdict.reader} {verdict.reason}" for verdict in engines if not verdict.serves]
    return "; ".join([f"served by {served}", *others])


def disk_lines(plan: Plan) -> Iterator[str]:
    """Yield the bytes that a run writes into its folder, and those that are free there."""
    folder = Path(os.path.abspath(plan.recipe.output_dir))
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    disk, free = plan.disk(), shutil.disk_usage(there).free
    yield f"{'disk in output_dir':44}{'GiB':>12}"
    for name, size in (disk | {"free there": free}).items():
        yield _row(name, number(size / GIB, 2 if size >= 2**27 else 4))
    if (needed := sum(disk.values())) > free:
        yield (
            f"the disk is too small: {number((needed - free) / GIB)} GiB too much; free some space, name another "
            "output_dir, or set train.keep_checkpoints=1"
        )


def run_lines(plan: Plan, rates: list[float], used: float | None) -> Iterator[str]:
    """Yield the steps, operations and hours of a run. `used`: cores that other processes use, if they are missed."""
    recipe = plan.recipe
    train = plan.recipe.train
    steps = max_steps(plan)
    answers = plan.recipe.data.regenerate
    yield "the run"
    yield _row("tokens a step", f"{plan.step_tokens:,}")
    if train.epochs is not None:
        yield _row("epochs of the data", f"{train.epochs:g}")
    by_target, by_head = flops_per_token(plan)
    yield _row("GFLOP a token, target", f"{by_target / 1e9:.3g}")
    yield _row("GFLOP a token, head, at most", f"{by_head / 1e9:.3g}")
    if used is not None:
        yield f"  hours of an idle machine: others use {used:.1f} of its cores now, so one thread's own time was taken"
    at_most = "" if train.epochs is None else ", at most"
    for number_of, how in ((plan.likely_steps, ", likely"), (steps, at_most)):
        if number_of is None:
            continue
        tokens = number_of * plan.step_tokens
        yield _row(f"steps{how}", f"{number_of:,}")
        yield _row(f"tokens{how}", short(tokens))
        yield _row(f"FLOP{how}", f"{tokens * (by_target + by_head):.1e}")
        for rate in rates:
            yield _hours(f"hours at {_rate(rate)}{how}", hours(plan, rate, tokens))
    for rate in rates if steps is None else ():
        yield _hours(f"10^9 tokens: hours at {_rate(rate)}", hours(plan, rate, 1e9))
    if answers is not None and answers.server is None and (prompts := answered_prompts(recipe)) is not None:
        answering = decoding_hours(plan, prompts, answers.new_tokens, answers.batch_size, is_busy=used is not None)
        yield _hours("hours of the answers before, an estimate", answering)
    if steps is not None:
        points = len(with_steps(recipe, steps).train.measured_steps)
        prompts = points * recipe.eval.num_prompts * len(split_prompts(recipe.eval.prompts))
        new_tokens, batch_size = recipe.eval.max_new_tokens, recipe.eval.batch_size
        measuring = decoding_hours(plan, prompts, new_tokens, batch_size, is_busy=used is not None)
        yield _hours(f"hours of {plural(points, 'measurement')}, an estimate", measuring)


def _rate(tflops: float) -> str:
    return f"{number(tflops, 0 if tflops >= 10 else 2)} TFLOP/s a device"


def _row(name: str, value: str) -> str:
    return f"  {name:42}{value:>12}"


def _hours(name: str, hours: float) -> str:
    return _row(name, number(hours, 1 if hours >= 1 else 3))


def max_steps(plan: Plan) -> int | None:
    """Return the number of optimizer steps, at most, or None if only the data determine it."""
    train = plan.recipe.train
    answers = plan.recipe.data.regenerate
    prompts = answered_prompts(plan.recipe)
    if train.epochs is None:
        return train.steps
    if answers is None or answers.share < 1 or prompts is None:
        return None
    return math.ceil(train.epochs * prompts * (answers.prompt_tokens + answers.new_tokens) / plan.step_tokens)


def answered_prompts(recipe: Recipe) -> int | None:
    """Return the number of prompts that the target answers before the training, or None if there are none or only the
    data determine it."""
    answers = recipe.data.regenerate
    limits = [source.limit for source in recipe.data.sources]
    if answers is None or (answers.prompts is None and None in limits):
        return None
    return answers.prompts or sum(limit or 0 for limit in limits)


def flops_per_token(plan: Plan) -> tuple[float, float]:
    """Return the operations per token of the target's forward pass and of the head's step, on these devices."""
    elsewhere = plan.launch.features in ("vllm", "cache")
    return 0.0 if elsewhere else plan.target_cost()[1], plan.head_cost()[1]


def hours(plan: Plan, tflops: float, tokens: float) -> float:
    """Return the hours of training on so many tokens, if each device computes at `tflops` TFLOP/s."""
    return tokens * sum(flops_per_token(plan)) / (tflops * 1e12 * plan.launch.processes) / 3600


def device_tflops(plan: Plan, *, is_busy: bool = False) -> float:
    """Return the TFLOP/s of one device: `H100` of a GPU; of a CPU, which all processes share, what a product of a
    micro-batch reaches here."""
    if plan.launch.device == "cuda":
        return H100
    rows = plan.recipe.train.batch_size * plan.recipe.data.context_length
    dtype = torch.bfloat16 if plan.bf16 else torch.float32
    width = min(plan.target.hidden_size, MAX_PRODUCT)
    reached = measured_tflops(dtype, min(rows, MAX_PRODUCT), width, is_busy=is_busy)
    return reached * _share_of_cores(plan.launch)


def _share_of_cores(launch: Launch) -> float:
    return min(1.0, len(os.sched_getaffinity(0)) / (launch.processes * torch.get_num_threads()))


def decoding_hours(plan: Plan, prompts: int, new_tokens: int, batch_size: int, *, is_busy: bool = False) -> float:
    """Return the hours in which the target answers so many prompts on these devices, without the prompts' own passes. A
    step of a batch takes a GPU the time to read the weights, or to compute; of a CPU, what a product of so many rows
    with a large matrix reaches here."""
    flops = 2.0 * plan.active * batch_size
    if plan.launch.device == "cuda":
        seconds = max(plan.target_bytes / H100_BANDWIDTH, flops / (H100 * 1e12))
    else:
        seconds = flops / (1e12 * measured_tflops(torch.float32, batch_size, DECODING_WIDTH, is_busy=is_busy))
        seconds /= _share_of_cores(plan.launch)
    return prompts * new_tokens / batch_size * seconds / 3600 / plan.launch.processes


def advice(plan: Plan) -> Iterator[tuple[str, int]]:
    """Yield changes that save memory, each with the bytes on one device after this change alone."""
    launch = plan.launch
    train = plan.recipe.train
    device = plan.device()
    total = sum(device.values())
    activations = device[ACTIVATIONS]
    others = total - device["target"]
    if train.batch_size > 1:
        more = "" if train.tokens_per_step else f" train.tokens_per_step={plan.step_tokens}"
        left = total - activations + activations // train.batch_size
        yield f"train.batch_size=1{more}, the same step", left
    else:
        yield f"data.context_length={plan.recipe.data.context_length // 2}", total - activations // 2
    if launch.features == "process":
        layers = plan.target.layers
        linear = sum(m.weight.numel() for m in layers.modules() if isinstance(m, nn.Linear))
        int8_bytes = plan.end_bytes + sum(plan.layer_bytes("int8"))
        if linear >= MIN_SHARE * sum(p.numel() for p in layers.parameters()) and int8_bytes < plan.target_bytes:
            yield "target.quantize=int8", others + int8_bytes
        largest = max(plan.layer_bytes(plan.recipe.target.quantize))
        if (room := launch.memory_bytes - others - largest) > 0:
            needed = max(2, math.ceil(plan.target_bytes / room), launch.processes)
            text = f"the target's layers divided among {needed} processes (--features sharded --processes {needed})"
            yield text, others - (-plan.target_bytes // needed) + largest
        yield "the target on a server (--features vllm)", others + plan.end_bytes
    if launch.processes > 1 and launch.sharing == "ddp":
        state = sum(device[name] for name in STATE)
        yield "the head's state divided (--sharing fsdp)", total - state + state // launch.processes
