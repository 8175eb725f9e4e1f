"""Answers of the target to the prompts of a recipe, as training reads them and as records."""

import json
from collections.abc import Sequence
from pathlib import Path

from eval.files import write_text
from heads.errors import UserError
from train.data.answers import make_answers
from train.data.loading import check_data
from train.data.sources import read_prompts
from train.launch import load_recipe_target, make_accelerator
from train.recipe import load_recipe
from train.run_folder import RunFolder
from train.tracker import Tracker


def regenerate(arguments: Sequence[str]) -> int:
    """Let the target answer, and write the records of a recipe and its overrides."""
    recipe = load_recipe(arguments[0], arguments[1:])
    settings = recipe.data.regenerate
    if settings is None:
        raise UserError(f"{arguments[0]}: data.regenerate: is missing; say how many prompts are to be answered")
    folder = RunFolder(Path(recipe.output_dir))
    accelerator = make_accelerator(recipe.train)
    tracker = Tracker(accelerator, folder, recipe.tracking, recipe.train.max_steps)
    folder.lock()
    try:
        target, tokenizer = load_recipe_target(recipe.target, accelerator)
        check_data(recipe.data, target)
        prompts = read_prompts(recipe.data, recipe.train.seed, tokenizer, settings, "data.regenerate", tracker.say)
        answers = make_answers(target, prompts, settings, folder.path, progress=tracker.answering)
        records = [
            {"text": tokenizer.decode(prompt + answer), "prompt_ids": prompt, "answer_ids": answer}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        write_text(folder.path / "answers.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        tracker.say(f"{len(records)} answers in {folder.path / 'answers.jsonl'}")
        return 0
    finally:
        folder.unlock()
