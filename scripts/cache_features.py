"""Fill a folder with the features that a recipe trains on: python scripts/cache_features.py RECIPE.yaml
[key.sub=value ...].

The recipe has `features: {kind: cache, folder: FOLDER}`. Training with the same recipe then reads the folder and no
longer needs the target's decoder layers. An interrupted run continues where it stopped.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import asks_usage
from heads.core.errors import UserError
from train.entry import run_script
from train.features.feature_settings import CacheFeatures, ProcessFeatures
from train.recipe.recipe import Recipe
from train.recipe.recipe_help import keys_of

USAGE = "usage: python scripts/cache_features.py RECIPE.yaml [key.sub=value ...]"


def main(arguments: Sequence[str]) -> int:
    if asks_usage(USAGE, arguments, keys=lambda: keys_of(Recipe)):
        return 0
    import torch

    from train.data.prepare import load_data
    from train.features.cached import fill_folder
    from train.recipe.head_section import make_head
    from train.run.open_run import open_reader, open_run, open_source, read_recipe

    recipe = read_recipe(arguments)
    settings = recipe.features
    if not isinstance(settings, CacheFeatures):
        raise UserError(f"{arguments[0]}: features.kind: expected cache, got {settings.kind}")
    with open_run(recipe) as run:
        say = run.tracker.say
        source, tokenizer = open_source(ProcessFeatures(kind="process"), recipe, run.accelerator, say)
        head = make_head(recipe.head, source.target, torch.zeros(source.target.vocab_size, dtype=torch.int64))
        reader = open_reader(recipe, source.target, tokenizer, run)
        mixture, _ = load_data(recipe.data, recipe.train.seed, head, source.target, reader, run.folder.path)
        source.check(mixture, head.aux_layer_ids)
        try:
            fill_folder(settings, source, mixture, head.aux_layer_ids, recipe.train.batch_size, run.accelerator, say)
        finally:
            source.close()
    return 0


if __name__ == "__main__":
    run_script(main)
