"""Let the target answer the prompts of a recipe: python scripts/regenerate.py RECIPE.yaml [key.sub=value ...].

Writes OUTPUT_DIR/answers.jsonl, a record a line: `text` (prompt and answer), `prompt_ids` and `answer_ids`. The answers
are also kept in the form that training reads, so a run of the same recipe in the same folder does not ask for them
again.
"""

import json
import sys
from pathlib import Path

from eval.command import asks_usage, exit_status
from eval.files import write_text
from heads.errors import UserError
from train.answers import make_answers
from train.launch import make_accelerator
from train.preparing import answering, load_recipe_target
from train.recipe import load_recipe
from train.run_folder import RunFolder
from train.sources import read_prompts
from train.tracker import Tracker


def regenerate(arguments: list[str]) -> int:
    """Answer, and write the records."""
    if asks_usage("usage: python scripts/regenerate.py RECIPE.yaml [key.sub=value ...]", arguments):
        return 0
    recipe = load_recipe(arguments[0], arguments[1:])
    settings = recipe.data.regenerate
    if settings is None:
        raise UserError(f"{arguments[0]}: data.regenerate: is missing; say how many prompts are to be answered")
    folder = RunFolder(Path(recipe.output_dir))
    tracker = Tracker(recipe, folder, main=True)
    folder.lock()
    try:
        loaded = load_recipe_target(make_accelerator(recipe.train), recipe)
        prompts = read_prompts(recipe, loaded.tokenizer, settings, "data.regenerate", tracker.say)
        answers = make_answers(loaded.target, prompts, settings, folder.path, progress=answering(tracker))
        records = [
            {"text": loaded.tokenizer.decode(prompt + answer), "prompt_ids": prompt, "answer_ids": answer}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        write_text(folder.path / "answers.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        tracker.say(f"{len(records)} answers in {folder.path / 'answers.jsonl'}")
        return 0
    finally:
        folder.unlock()


if __name__ == "__main__":
    sys.exit(exit_status(lambda: regenerate(sys.argv[1:])))
