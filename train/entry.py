"""Arguments and exit status of the entries train/*.py, and of scripts that `accelerate launch` may start."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from eval.core.command_line import Parser, asks_usage, exit_status, place, print_line, typed
from heads.core.errors import UserError
from heads.core.strict_settings import Count
from train.core.strict_yaml import Amount
from train.plan.derive import derived_recipe
from train.recipe.recipe import KINDS, Recipe, check_kind, load_recipe
from train.recipe.recipe_help import keys_of

USAGE = (
    "usage: python train/{name}.py RECIPE.yaml [key.sub=value ...] [--plan], or without a recipe: python "
    "train/{name}.py --model ID_OR_FOLDER --data FILE_OR_ID ...; several processes: accelerate launch train/{name}.py "
    "..."
)
DERIVING = """Without a recipe, one is derived, printed and saved in the run's folder:
  --model ID_OR_FOLDER      the target: a folder or a Hub id
  --data FILE_OR_ID         conversations or prompts: a file of JSON lines, a folder, or the Hub id of a data set. The
                            target answers them itself. 5% of them, 16 to 80, are held out (of fewer than 80 a fifth,
                            but at least 8): the head is measured on them and never trained on them.
                            data.sources.0.limit=N reads only the first N
Keys given as key=value are kept; the same command resumes the run."""
PLANNING = """--plan prints the memory, operations and hours of a run, computed from the configs. Options:
  --processes N             number of processes, one for each device
  --sharing MODE            how processes share the head's training state: ddp, fsdp, zero2 or zero3
  --features PLACE          where the target runs: process (whole in each process), sharded, vllm or cache
  --memory GIB              memory of a GPU to plan for; default: this machine's device
  --tflops X                TFLOP/s of a device; may be repeated (default: 396, 40% of an H100's; on a CPU, measured)"""
TRACKING = "--wandb online, offline or off sets tracking.wandb, as for eval/bench.py and eval/sweep.py."
ABOUT = (DERIVING, PLANNING, TRACKING)


def run_entry(name: str) -> None:
    """Train the recipe on the command line, measure the head, and end the process with its exit status: 0 for success,
    2 for a user's error, 130 for an interrupt, 1 for a fault of ours."""
    _end(attempt(name, sys.argv[1:]))


def run_script(main: Callable[[Sequence[str]], int]) -> None:
    """Run a script with the command line's arguments, and end the process in the way a training run does."""
    _end(exit_status(lambda: main(sys.argv[1:]), say_why))


def attempt(name: str, arguments: Sequence[str]) -> int:
    def run() -> int:
        usage, about = USAGE.format(name=name), "\n\n".join(ABOUT)
        if asks_usage(usage, arguments, keys=lambda: keys_of(Recipe, KINDS[name]), about=about):
            return 0
        options = parse_arguments(arguments)
        if options.model or options.data:
            recipe = derived_recipe(options, name)
        elif not options.overrides:
            raise UserError(f"{usage}; --help all lists the keys")
        else:
            path, *overrides = options.overrides
            recipe = load_recipe(path, overrides)
            check_kind(recipe, path, name)
            from train.run.open_run import fit_template  # imports torch, which takes seconds, once the recipe is right

            recipe = fit_template(recipe, overrides)
            if options.plan:
                from train.plan.memory_and_flops import Plan
                from train.plan.plan_lines import launch_of, print_plan

                print_plan(Plan(recipe, launch_of(options, recipe)), options.tflops)
        if options.plan:
            return 0
        from train.run.train_and_measure import train

        results = train(recipe)
        return 0 if results is None or results.is_exact else 1

    return exit_status(run, say_why)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of an entry. The other words, a recipe and overrides, are its `overrides`."""
    parser = Parser("Train a head.")
    parser.allow_abbrev = False
    add = parser.add_argument
    add("overrides", nargs="*")
    add("--model", type=place)
    add("--data", type=place)
    add("--wandb", type="tracking.wandb={}".format)
    add("--plan", action="store_true")
    planning = [
        add("--processes", type=typed(Count)),
        add("--sharing", choices=("ddp", "fsdp", "zero2", "zero3")),
        add("--features", choices=("process", "sharded", "vllm", "cache")),
        add("--memory", type=typed(Amount)),
        add("--tflops", type=typed(Amount), action="append"),
    ]
    options, unknown = parser.parse_known_intermixed_args(list(arguments))
    for word in unknown:  # --key=value is key=value
        if not word.startswith("--") or "=" not in word:
            parser.error(f"unrecognized arguments: {word}")
    options.overrides += unknown + [options.wandb] * bool(options.wandb)
    for option in planning:
        if getattr(options, option.dest) is not None and not options.plan:
            parser.error(f"--{option.dest}: is an option of --plan")
    return options


def say_why(text: str) -> None:
    """Print why the process ends. Of several processes, only the first one to end prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        print_line(text)
        return
    from train.core.processes import tell_first

    tell_first(text)


def _end(status: int) -> None:
    if "accelerate" in sys.modules:
        from train.core.processes import leave

        leave(status)
    sys.exit(status)
