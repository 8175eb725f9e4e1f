"""The option `--plan` of the training entries: it prints the resources of a run without loading weights or data."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from eval.command import Parser, count
from eval.reporting.format import count as short
from eval.reporting.format import number, plural
from train.launch import wanted_mode
from train.planning.plan import FEATURES, SHARINGS, TOKEN_BYTES, Launch, Plan, make_plan
from train.run import recipe_of

GIB = 2**30
NAMES = {
    "target": "target",
    "head": "head, float32",
    "gradients": "gradients, float32",
    "optimizer": "optimizer",
    "measured copy": "the head as it is measured",
    "activations": "activations of a micro-batch",
}


def plan(arguments: Sequence[str], name: str, kinds: dict[str, str]) -> int:
    """Print the plan of a recipe for train/NAME.py. The exit status is 0, whether the run fits or not."""
    options = parse_arguments(arguments)
    recipe = recipe_of([options.recipe, *options.overrides], name, kinds)
    launch = Launch(options.processes, options.sharing, options.features or recipe.features.kind, options.memory)
    made = make_plan(recipe, launch)
    text = "\n".join(lines(made, options.tflops or [made.tflops()]))
    if os.environ.get("RANK", "0") == "0":
        print(text)
    return 0


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the recipe, its overrides, and the options of a plan."""
    parser = Parser("Plan a run.")
    add: Any = parser.add_argument
    add("recipe")
    add("overrides", nargs="*")
    add("--plan", action="store_true")
    add("--processes", type=count, default=int(os.environ.get("WORLD_SIZE", "1")))
    add("--sharing", choices=list(SHARINGS), default=_launched())
    add("--features", choices=FEATURES)
    add("--memory", type=_positive)
    add("--tflops", type=_positive, action="append")
    options, others = parser.parse_known_intermixed_args(list(arguments))
    for word in others:  # --key=value is key=value
        if not word.startswith("--") or "=" not in word:
            parser.error(f"unrecognized arguments: {word}")
    options.overrides += others
    return options


def _launched() -> str:
    """Return the sharing mode of `accelerate launch`."""
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    return ("zero3" if stage == "3" else "zero2") if wanted_mode() == "deepspeed" else wanted_mode()


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def lines(made: Plan, rates: Sequence[float]) -> list[str]:
    """Return the plan as lines of text. `rates`: speeds of a device in TFLOP/s, each for an estimate of the hours."""
    recipe, launch, head, target = made.recipe, made.launch, made.head, made.target
    train, T = recipe.train, recipe.data.context_length
    device, whole, memory = made.device(), made.device_bytes(), launch.memory_bytes
    by_target, by_head = made.flops_per_token()
    products = "bfloat16" if launch.bf16(train.precision) else "float32"
    found = [
        f"{recipe.head.kind} for {recipe.target.path}: {plural(launch.processes, 'device')} ({launch.sharing}), "
        f"target: {launch.features}; {train.batch_size} x {T} tokens a micro-batch, {products} products",
        "parameters",
        _row("target", short(target.total)),
        _row("target, active for a token", short(target.active)),
        _row("head, trained", short(head.trained)),
    ]
    if head.frozen:
        found.append(_row("head, frozen", short(head.frozen)))
    found.append(f"{'memory of each device':44}{'GiB':>12}")
    names = {**NAMES, "extra": SHARINGS[launch.sharing], "target": f"target, {target.dtype}"}
    names["optimizer"] = f"optimizer, {train.optimizer}"
    found += [_gib(names[key], size) for key, size in device.items()]
    found.append(_gib("  of these, the target's features", head.features))
    found.append(_gib("  of these, one chunk of logits", head.chunk))
    found += [_gib("whole", whole), _gib("the device's memory", memory)]
    found.append(f"{'host memory':44}{'GiB':>12}")
    found += [_gib(f"a {name}", size) for name, size in made.host().items()]
    found.append(f"{'disk':44}{'GiB':>12}")
    found += [_gib(name, size) for name, size in made.disk().items()]
    if recipe.data.regenerate is None or recipe.data.regenerate.share < 1:
        found.append(_row("each 10^9 tokens of the sources", number(TOKEN_BYTES * 1e9 / GIB)))
    found.append("the run")
    most = "" if train.epochs is None else ", at most"
    if train.epochs is not None:
        found.append(_row("epochs of the data", f"{train.epochs:g}"))
    if made.steps is not None:
        found.append(_row(f"steps{most}", f"{made.steps:,}"))
    found.append(_row("tokens a step", f"{made.step_tokens:,}"))
    if made.tokens is not None:
        found.append(_row(f"tokens{most}", short(made.tokens)))
    if made.answer_tokens():
        found.append(_row("tokens of answers made first, at most", short(made.answer_tokens())))
    found += [
        _row("GFLOP a token, target", f"{by_target / 1e9:.3g}"),
        _row("GFLOP a token, head, at most", f"{by_head / 1e9:.3g}"),
    ]
    if made.tokens is None:
        hours = [("10^9 tokens: hours at", made.hours(rate, 1e9), rate) for rate in rates]
    else:
        found.append(_row("FLOP", f"{made.tokens * (by_target + by_head):.1e}"))
        hours = [("hours at", made.hours(rate), rate) for rate in rates]
    for what, each, rate in hours:
        name = f"{what} {number(rate, 0 if rate >= 10 else 2)} TFLOP/s a device"
        found.append(_row(name, number(each, 1 if each >= 1 else 3)))
    if whole <= memory:
        return [*found, f"fits: {number((memory - whole) / GIB)} GiB of each device are left"]
    found.append(f"does not fit: {number((whole - memory) / GIB)} GiB too much on each device. Each by itself gives")
    for text, left in made.advice():
        found.append(f"  {number(left / GIB):>8} GiB, {'fits' if left <= memory else 'too much'}: {text}")
    return found


def _row(name: str, value: str) -> str:
    return f"  {name:42}{value:>12}"


def _gib(name: str, size: float) -> str:
    return _row(name, number(size / GIB, 2 if size >= 2**27 else 4))
