"""Arguments and exit status of the entries train/*.py, and of scripts that `accelerate launch` may start."""

import os
import sys
from collections.abc import Callable, Sequence

from eval.measure.command import asks_usage, exit_status, print_line
from train.derive import is_derived, run_derived
from train.recipe import KINDS, Recipe, check_kind, load_recipe
from train.recipe_help import keys_of

PLAN = "--plan"
USAGE = (
    f"usage: python train/{{name}}.py RECIPE.yaml [key.sub=value ...] [{PLAN}], or without a recipe: python "
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
PLANNING = f"""{PLAN} prints the memory, operations and hours of a run, computed from the configs. Options:
  --processes N             number of processes, one for each device
  --sharing MODE            how processes share the head's training state: ddp, fsdp, zero2 or zero3
  --features PLACE          where the target runs: process (whole in each process), sharded, vllm or cache
  --memory GIB              memory of a GPU to plan for; default: this machine's device
  --tflops X                TFLOP/s of a device; may be repeated (default: 396, 40% of an H100's; on a CPU, measured)"""


def run_entry(name: str) -> None:
    """Train the recipe on the command line, measure the head, and end the process with its exit status: 0 for success,
    2 for a user's error, 130 for an interrupt, 1 for a fault of ours."""
    _end(attempt(name, sys.argv[1:]))


def run_script(main: Callable[[Sequence[str]], int]) -> None:
    """Run a script with the command line's arguments, and end the process in the way a training run does."""
    _end(exit_status(lambda: main(sys.argv[1:]), say_why))


def attempt(name: str, arguments: Sequence[str]) -> int:
    def run() -> int:
        asked = ["--help"] if "--help" in arguments else arguments
        if asks_usage(USAGE.format(name=name), asked, keys=lambda: _help(name)):
            return 0
        if is_derived(arguments):
            return run_derived(arguments, name)
        if PLAN in arguments:
            from train.plan import plan

            return plan(arguments, name)
        check_kind(load_recipe(arguments[0], arguments[1:]), arguments[0], name)  # before torch is imported
        from train.open_run import read_recipe
        from train.run import train_head

        return train_head(read_recipe(arguments))

    return exit_status(run, say_why)


def _help(name: str) -> str:
    return f"{DERIVING}\n\n{PLANNING}\n\n{keys_of(Recipe, KINDS[name])}"


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
