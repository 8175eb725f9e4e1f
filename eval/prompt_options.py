"""The prompts of a script that decodes some: its options, the prompts they name, and what a record says of them."""

import argparse
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eval.command import Parser, count, prompt_room, seed
from eval.prompts import HELD_OUT_SUITE, Prompt, load_prompts, prompts_hash
from eval.results import Results
from heads.target import FrozenTarget


def add_prompt_options(parser: Parser, *, num_prompts: int, max_prompt_tokens: int, max_new_tokens: int) -> None:
    """Which prompts, how many tokens of each, and where the record goes; the numbers are defaults."""
    add = parser.add_argument
    add("--prompts", default=HELD_OUT_SUITE, help="a suite or a file")
    add("--num-prompts", type=count, default=num_prompts, help="evenly spread")
    add("--max-prompt-tokens", type=count, default=max_prompt_tokens, help="longer prompts are left out")
    add("--max-new-tokens", type=count, default=max_new_tokens, help="of every prompt")
    add("--seed", type=seed, default=0, help="of the sampling and of the choice of held-out prompts")
    add("--out", type=Path, help="a JSON file for the record")


def chosen_prompts(
    options: argparse.Namespace, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, most_nodes: int
) -> list[Prompt]:
    """The prompts that the options name, each with room for its output and a tree of `most_nodes`."""
    room = prompt_room(target, options.max_new_tokens, most_nodes)
    return load_prompts(
        options.prompts,
        tokenizer,
        num_prompts=options.num_prompts,
        max_prompt_tokens=min(room, options.max_prompt_tokens),
        seed=options.seed,
        skip_long=True,
    )


def prompt_facts(options: argparse.Namespace, prompts: list[Prompt]) -> Results:
    """What was decoded."""
    return {
        "prompts": options.prompts,
        "num_prompts": len(prompts),
        "prompts_hash": prompts_hash(prompts),
        "max_new_tokens": options.max_new_tokens,
    }
