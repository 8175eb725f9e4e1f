"""Train a small target from scratch: accelerate launch -q scripts/make_target.py recipes/quickstart/target.yaml

Trains a byte-level BPE tokenizer and a Llama-architecture model on the Python source of this machine, with whole
modules held out (`eval.measure.python_source`), and on conversations if the recipe names some. recipes/targets/*.yaml
train larger ones on a GPU. Matrices are trained with Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon),
embeddings and norms with AdamW. The run folder gets `model/` (bfloat16, with the tokenizer and a README of the measured
values) and `checkpoints/`. A stopped run continues from the newest checkpoint.
"""

from collections.abc import Sequence

from eval.measure.command import asks_usage
from train.entry import LAUNCH, run_script
from train.recipe_help import keys_of
from train.target_recipe import TargetRecipe

USAGE = f"usage: {LAUNCH} scripts/make_target.py RECIPE.yaml [key.sub=value ...]"


def main(arguments: Sequence[str]) -> int:
    if asks_usage(USAGE, arguments, keys=lambda: keys_of(TargetRecipe)):
        return 0
    from train.target_making import make_target

    return make_target(arguments)


if __name__ == "__main__":
    run_script(main)
