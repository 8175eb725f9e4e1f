"""Fill a folder with the features that a recipe trains on: python scripts/cache_features.py RECIPE.yaml
[key.sub=value ...].

The recipe says `features: {kind: cache, folder: FOLDER}`. Training by the same recipe then reads the folder, and needs
the target's decoder layers no more. An interrupted filling goes on where it stopped.
"""

import sys

from eval.command import asks_usage, exit_status
from train.usage import recipe_keys

USAGE = "usage: python scripts/cache_features.py RECIPE.yaml [key.sub=value ...]"


def main() -> int:
    if asks_usage(USAGE, sys.argv[1:], keys=recipe_keys):
        return 0
    from train.features.filling import fill

    return fill(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(exit_status(main))
