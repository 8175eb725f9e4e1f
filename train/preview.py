"""A preview of a recipe's data, without training: python -m train.preview RECIPE.yaml [key.sub=value ...].

Prints what a run prints of each source before training: its form, its sizes, what is left out and why, and its first
document with the labels in brackets. A run of the recipe reuses the tokenised data.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import asks_usage, exit_status
from train.recipe.recipe import Recipe
from train.recipe.recipe_help import keys_of

USAGE = "usage: python -m train.preview RECIPE.yaml [key.sub=value ...]"


def main(arguments: Sequence[str]) -> int:
    if asks_usage(USAGE, arguments, keys=lambda: keys_of(Recipe)):
        return 0
    from accelerate import Accelerator

    from train.data.answers import read_prompts
    from train.data.corpus import Reader
    from train.data.tokenise import read_source
    from train.run.open_run import read_recipe, rendering_of, tokenizer_of

    recipe = read_recipe(arguments)
    data = recipe.data
    tokenizer = tokenizer_of(recipe.target)
    reader = Reader(rendering_of(recipe, tokenizer), Accelerator(cpu=True), print)
    share = 0.0 if data.regenerate is None else data.regenerate.share
    if share < 1:
        for number, source in enumerate(data.sources):
            read_source(source, f"data.sources.{number}", reader)
    if data.regenerate is not None:
        print(f"data.regenerate: before training, the target answers these prompts itself, for {share:.0%} of the rows")
        read_prompts(data, recipe.train.seed, data.regenerate, "data.regenerate", reader, quiet=share < 1)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
