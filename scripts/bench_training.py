"""What a setting of a recipe costs in training time: short runs of each variant, in turns.

    python scripts/bench_training.py recipes/quickstart.yaml --variant --variant head.later_slots=0.5
    python scripts/bench_training.py recipes/quickstart.yaml head.depth=7 --variant train.precision=fp32 \
        --variant train.precision=bf16 "features={kind: cache, folder: features}"

A variant is the recipe with further overrides; --variant without any is the recipe itself, with the overrides behind
it. In a turn each variant trains 2 * --steps steps, of which the second half is timed: the target's pass, loss,
gradient and update. The first turn fills caches and is not counted. Ratios are paired over turns, to the first variant.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, exit_status, typed
from eval.core.progress import Progress
from eval.pages.texts import with_interval
from eval.records.metrics import Rate, rate_ratio, rate_ratio_interval
from eval.records.results import read_log
from heads.core.errors import UserError
from heads.core.strict_settings import Count
from heads.methods.method_settings import METHODS
from train.recipe.recipe import load_recipe

ENTRIES = Path(__file__).resolve().parents[1] / "train"
UNMEASURED = [
    *(f"eval.{key}=1" for key in ("num_prompts", "max_new_tokens", "report.num_prompts", "report.max_new_tokens")),
    "tracking.wandb=off",
    "tracking.trackio=false",
]
"""Overrides that leave little of a run but its steps, which no tracker is told of."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Training time of a recipe's variants, in turns.")
    add: Any = parser.add_argument
    add("recipe", nargs="+", help="RECIPE.yaml [key.sub=value ...]")
    add("--variant", nargs="*", action="append", required=True, help="overrides of one variant; may be repeated")
    add("--steps", type=typed(Count), default=10, help="timed steps of a variant in a turn; default: %(default)s")
    add("--turns", type=typed(Count), default=5, help="counted turns; default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    file, *shared = options.recipe
    recipes = [load_recipe(file, [*shared, *variant]) for variant in options.variant]  # wrong keys end it at once
    runs: list[list[tuple[int, float, float]]] = [[] for _ in recipes]
    with (
        tempfile.TemporaryDirectory(prefix="draftsmith-") as made,
        Progress("run", (options.turns + 1) * len(recipes), cold=True) as progress,
    ):
        for turn in range(options.turns + 1):
            for n, (recipe, variant) in enumerate(zip(recipes, options.variant, strict=True)):
                folder = Path(made, f"{turn}-{n}")
                run = timed_run(METHODS[recipe.head.kind].entry, [file, *shared, *variant], options.steps, folder)
                if turn > 0:
                    runs[n].append(run)
                progress.advance()
    first = rate_of(runs[0])
    print(f"{options.turns} turns of {options.steps} steps each, after {options.steps} that are not timed")
    print(f"{'tokens/s':>10}  {'over the first':22}{'loss':>10}  variant")
    for variant, found in zip(options.variant, runs, strict=True):
        rate = rate_of(found)
        ratio = with_interval(rate_ratio(rate, first), rate_ratio_interval(rate, first))
        speed, loss = sum(rate[0]) / sum(rate[1]), found[-1][2]
        print(f"{speed:10.1f}  {ratio:22}{loss:10.4f}  {' '.join(variant) or 'the recipe'}")
    return 0


def timed_run(entry: str, words: Sequence[str], steps: int, folder: Path) -> tuple[int, float, float]:
    """Train 2 * `steps` steps in `folder` and return the tokens, seconds and loss of the second half. `words`: the
    recipe and its overrides."""
    own = [f"output_dir={folder}", f"train.max_steps={2 * steps}", f"train.log_every={steps}", "train.eval_points=1"]
    command = [sys.executable, str(ENTRIES / f"{entry}.py"), *words, *own, *UNMEASURED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in read_log(folder / "metrics.jsonl") if line["kind"] == "train"]
    if not lines or lines[-1]["step"] != 2 * steps:
        errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
        why = errors[-1] if errors else f"the training ended with exit status {done.returncode}"
        raise UserError(f"{' '.join(words)}: {why}")
    tokens = lines[-1]["tokens"] - lines[-2]["tokens"]
    return tokens, tokens / lines[-1]["tokens_per_second"], lines[-1]["loss"]


def rate_of(runs: Sequence[tuple[int, float, float]]) -> Rate:
    return [tokens for tokens, _, _ in runs], [seconds for _, seconds, _ in runs]


if __name__ == "__main__":
    sys.exit(exit_status(main))
