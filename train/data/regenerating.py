"""Answers of the target to the prompts of a recipe, stored for training and written as records."""

import json
from collections.abc import Sequence

from heads.errors import UserError
from heads.files import write_text
from train.data.loading import check_data, read_answering
from train.launch import load_recipe_target, on_main
from train.opening import open_reader, open_run, read_recipe


def regenerate(arguments: Sequence[str]) -> int:
    """Let the target answer the prompts of a recipe with its overrides, write answers.jsonl, and return 0."""
    recipe = read_recipe(arguments)
    if recipe.data.regenerate is None:
        raise UserError(f"{arguments[0]}: data.regenerate: is missing; data.regenerate={{}} answers all prompts")
    with open_run(recipe) as run:
        target, tokenizer = load_recipe_target(recipe.target, run.accelerator)
        check_data(recipe.data, target)
        reader = open_reader(recipe.data, tokenizer, run)
        answering = read_answering(recipe.data, recipe.train.seed, target, reader)
        answering.ask()
        path = run.folder.path / "answers.jsonl"

        def write() -> int:
            records = [
                {"text": tokenizer.decode([*prompt, *answer]), "prompt_ids": prompt, "answer_ids": answer}
                for dialogue in answering.answered()
                for prompt, answer in dialogue.exchanges
            ]
            write_text(path, "".join(json.dumps(record) + "\n" for record in records))
            return len(records)

        run.tracker.say(f"{on_main(run.accelerator, write)} answers in {path}")
    return 0
