"""Generate the target's answers to a recipe's prompts: python scripts/regenerate.py RECIPE.yaml [key.sub=value ...].

Writes OUTPUT_DIR/answers.jsonl, one conversation a line, which a source of kind chat reads. The answers are also
kept with the tokenised data, so that no later run generates them again for the same data and target. An interrupted run
resumes where it stopped.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import asks_usage
from heads.core.errors import UserError
from train.entry import run_script
from train.recipe.recipe import Recipe
from train.recipe.recipe_help import keys_of

USAGE = "usage: python scripts/regenerate.py RECIPE.yaml [key.sub=value ...]"


def main(arguments: Sequence[str]) -> int:
    if asks_usage(USAGE, arguments, keys=lambda: keys_of(Recipe)):
        return 0
    from heads.core.files import write_bytes
    from train.core.processes import on_main
    from train.data.answers import open_answers
    from train.data.prepare import check_data
    from train.run.open_run import open_reader, open_run, read_recipe
    from train.steps.accelerate_launch import load_recipe_target

    recipe = read_recipe(arguments)
    if recipe.data.regenerate is None:
        raise UserError(f"{arguments[0]}: data.regenerate: is missing; data.regenerate={{}} answers all prompts")
    with open_run(recipe) as run:
        target, tokenizer = load_recipe_target(recipe.target, run.accelerator)
        check_data(recipe.data, target)
        reader = open_reader(recipe, target, tokenizer, run)
        answers = open_answers(recipe.data, recipe.train.seed, target, reader)
        answers.generate()
        path = run.folder.path / "answers.jsonl"
        on_main(run.accelerator, lambda: write_bytes(path, answers.lines()))
        run.tracker.say(f"{answers.count} answered conversations in {path}")
    return 0


if __name__ == "__main__":
    run_script(main)
