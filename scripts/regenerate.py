"""Generate the target's answers to the prompts of a recipe, as training data.

    python scripts/regenerate.py RECIPE.yaml [key.sub=value ...]

Writes OUTPUT_DIR/answers.jsonl with one record per answer: `text` (prompt and answer), `prompt_ids` and `answer_ids`.
The answers are also cached with the tokenised data, so that no run generates them again with the same target.
"""

from collections.abc import Sequence

from eval.command import asks_usage
from train.entry import run_script
from train.usage import recipe_keys

USAGE = "usage: python scripts/regenerate.py RECIPE.yaml [key.sub=value ...]"


def main(arguments: Sequence[str]) -> int:
    if asks_usage(USAGE, arguments, keys=recipe_keys):
        return 0
    from train.data.regenerating import regenerate

    return regenerate(arguments)


if __name__ == "__main__":
    run_script(main)
