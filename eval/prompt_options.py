"""The prompts of a script that decodes some: its options; `eval.opening.chosen_prompts` reads them."""

from pathlib import Path

from eval.command import Parser, count, seed
from eval.prompts import HELD_OUT_SUITE


def add_prompt_options(parser: Parser, *, num_prompts: int, max_prompt_tokens: int, max_new_tokens: int) -> None:
    """Which prompts, how many tokens of each, and where the record goes; the numbers are defaults."""
    add = parser.add_argument
    add("--prompts", default=HELD_OUT_SUITE, help="a suite or a file")
    add("--num-prompts", type=count, default=num_prompts, help="evenly spread")
    add("--max-prompt-tokens", type=count, default=max_prompt_tokens, help="longer prompts are left out")
    add("--max-new-tokens", type=count, default=max_new_tokens, help="of every prompt")
    add("--seed", type=seed, default=0, help="of the sampling and of the choice of held-out prompts")
    add("--out", type=Path, help="a JSON file for the record")
