"""Generate the target's answers to a recipe's prompts: python scripts/regenerate.py RECIPE.yaml [key.sub=value ...].

Writes OUTPUT_DIR/answers.jsonl, one record per answer: `text` (prompt and answer), `prompt_ids` and `answer_ids`. The
answers are also kept with the tokenised data, so no later run generates them with the same target again.
"""

from collections.abc import Sequence

from eval.command import asks_usage
from train.entry import run_script
from train.recipe import Recipe
from train.usage import keys_of

USAGE = "usage: python scripts/regenerate.py RECIPE.yaml [key.sub=value ...]"


def main(arguments: Sequence[str]) -> int:
    if asks_usage(USAGE, arguments, keys=lambda: keys_of(Recipe)):
        return 0
    from train.data.regenerating import regenerate

    return regenerate(arguments)


if __name__ == "__main__":
    run_script(main)
