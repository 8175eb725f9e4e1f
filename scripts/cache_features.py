"""Fill a folder with the features that a recipe trains on: python scripts/cache_features.py RECIPE.yaml
[key.sub=value ...].

The recipe has `features: {kind: cache, folder: FOLDER}`. Training with the same recipe then reads the folder and no
longer needs the target's decoder layers. An interrupted run continues where it stopped.
"""

from collections.abc import Sequence

from eval.command import asks_usage
from train.entry import run_script
from train.recipe import Recipe
from train.usage import keys_of

USAGE = "usage: python scripts/cache_features.py RECIPE.yaml [key.sub=value ...]"


def main(arguments: Sequence[str]) -> int:
    if asks_usage(USAGE, arguments, keys=lambda: keys_of(Recipe)):
        return 0
    from train.features.filling import fill

    return fill(arguments)


if __name__ == "__main__":
    run_script(main)
