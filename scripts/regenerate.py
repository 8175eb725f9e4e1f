"""Generate the target's answers to a recipe's prompts: python scripts/regenerate.py RECIPE.yaml [key.sub=value ...].

Writes OUTPUT_DIR/answers.jsonl, one record per answer: `text` (prompt and answer), `prompt_ids` and `answer_ids`. The
answers are also kept with the tokenised data, so no later run generates them with the same target again.
"""

import json
from collections.abc import Sequence

from eval.measure.command import asks_usage
from heads.core.errors import UserError
from train.entry import run_script
from train.recipe import Recipe
from train.recipe_help import keys_of

USAGE = "usage: python scripts/regenerate.py RECIPE.yaml [key.sub=value ...]"


def main(arguments: Sequence[str]) -> int:
    if asks_usage(USAGE, arguments, keys=lambda: keys_of(Recipe)):
        return 0
    from heads.core.files import write_text
    from train.accelerator import load_recipe_target
    from train.core.processes import on_main
    from train.data.answers import read_answering
    from train.data.prepare import check_data
    from train.open_run import open_reader, open_run, read_recipe

    recipe = read_recipe(arguments)
    if recipe.data.regenerate is None:
        raise UserError(f"{arguments[0]}: data.regenerate: is missing; data.regenerate={{}} answers all prompts")
    with open_run(recipe) as run:
        target, tokenizer = load_recipe_target(recipe.target, run.accelerator)
        check_data(recipe.data, target)
        reader = open_reader(recipe, target, tokenizer, run)
        answering = read_answering(recipe.data, recipe.train.seed, target, reader)
        answering.ask()
        path = run.folder.path / "answers.jsonl"

        def write() -> int:
            records = [
                {
                    "text": tokenizer.decode([*prompt, *answer], clean_up_tokenization_spaces=False),
                    "prompt_ids": prompt,
                    "answer_ids": answer,
                }
                for dialogue in answering.answered()
                for prompt, answer in dialogue.exchanges
            ]
            write_text(path, "".join(json.dumps(record) + "\n" for record in records))
            return len(records)

        run.tracker.say(f"{on_main(run.accelerator, write)} answers in {path}")
    return 0


if __name__ == "__main__":
    run_script(main)
