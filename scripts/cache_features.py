"""Write the target's features that a recipe trains on into a folder.

    python scripts/cache_features.py RECIPE.yaml [key.sub=value ...]

The recipe contains `features: {kind: cache, folder: FOLDER}`. Training with the same recipe then reads the folder and
does not need the target's decoder layers. If the script is interrupted, the same command continues where it stopped.
"""

from collections.abc import Sequence

from eval.command import asks_usage
from train.entry import run_script
from train.usage import recipe_keys

USAGE = "usage: python scripts/cache_features.py RECIPE.yaml [key.sub=value ...]"


def main(arguments: Sequence[str]) -> int:
    if asks_usage(USAGE, arguments, keys=recipe_keys):
        return 0
    from train.features.filling import fill

    return fill(arguments)


if __name__ == "__main__":
    run_script(main)
