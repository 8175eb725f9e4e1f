"""Make a small real target from scratch: accelerate launch scripts/make_target.py recipes/quickstart/target.yaml

A byte-level BPE and a Llama-architecture model, trained on the Python source of this machine with whole modules held
out (`eval.benchmark.python_source`), and on conversations where the recipe names some. Larger ones, for a GPU:
recipes/targets/*.yaml. Matrices are trained by Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon),
embeddings and norms by AdamW. The run folder gets `model/` (bfloat16, with tokenizer and a README of what was measured)
and `checkpoints/`; a run that was stopped goes on from the newest.
"""

from collections.abc import Sequence

from eval.command import asks_usage
from train.entry import LAUNCH, run_script
from train.usage import target_recipe_keys

USAGE = f"usage: {LAUNCH} scripts/make_target.py RECIPE.yaml [key.sub=value ...]"


def main(arguments: Sequence[str]) -> int:
    if asks_usage(USAGE, arguments, keys=target_recipe_keys):
        return 0
    from train.target_making import make_target

    return make_target(arguments)


if __name__ == "__main__":
    run_script(main)
