"""Generate text with a draft head. Answers are streamed, with accepted draft tokens in colour, and tau is shown.

    python eval/chat.py runs/quickstart --prompt 'import os'       # one answer
    python eval/chat.py HEAD_DIR_OR_HUB_ID                         # a conversation; Ctrl-D ends it, Ctrl-C an answer

The text is the same as that of plain decoding, token for token, with any head. A target with a chat template answers;
any other target continues the text. If the output is not a terminal, only the text is written to it. NO_COLOR disables
colours. Exit status: 0; 2, with one line, for an error that the user can fix; 130 for an interrupt outside an answer,
or during the answer to --prompt.
"""

import argparse
import sys
from collections.abc import Sequence

from eval.command import Parser, add_head_options, count, draft_tree, exit_status, seed, temperature


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Generate with a draft head. Answers are streamed, with accepted draft tokens in colour.")
    add_head_options(parser)
    add = parser.add_argument
    add("--prompt", help="answer this prompt and exit; without it, each line of the input is a prompt")
    add(
        "--tree",
        type=draft_tree,
        help="draft: chain:5, tree:5x8x24, static:3.2.1 or head; default: chain:5, or chain:3",
    )
    add("--temperature", type=temperature, default="0", help="0 is greedy")
    add("--seed", type=seed, default=0, help="seed of the sampling; each further answer adds 1")
    add("--max-new-tokens", type=count, default=256, help="most new tokens of each answer")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.commands.chat_run import chat

    return chat(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
