"""Answers of the target to the prompts of a recipe, as training reads them and as records."""

import json
from collections.abc import Sequence

from eval.files import write_text
from heads.errors import UserError
from train.data.answers import make_answers
from train.data.loading import check_data, read_prompts
from train.launch import load_recipe_target
from train.opening import open_reader, open_run
from train.recipe import load_recipe


def regenerate(arguments: Sequence[str]) -> int:
    """Let the target answer, and write the records of a recipe and its overrides."""
    recipe = load_recipe(arguments[0], arguments[1:])
    settings = recipe.data.regenerate
    if settings is None:
        raise UserError(f"{arguments[0]}: data.regenerate: is missing; say how many prompts are to be answered")
    with open_run(recipe) as run:
        folder, say = run.folder.path, run.tracker.say
        target, tokenizer = load_recipe_target(recipe.target, run.accelerator)
        check_data(recipe.data, target)
        reader = open_reader(recipe.data, tokenizer, run)
        prompts = read_prompts(recipe.data, recipe.train.seed, settings, "data.regenerate", reader)
        requests = [settings.request(prompt, n) for n, prompt in enumerate(prompts)]
        answers = make_answers(target, requests, settings.batch_size, folder, progress=run.tracker.answering)
        records = [
            {"text": tokenizer.decode(prompt + answer), "prompt_ids": prompt, "answer_ids": answer}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        write_text(folder / "answers.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        say(f"{len(records)} answers in {folder / 'answers.jsonl'}")
    return 0
