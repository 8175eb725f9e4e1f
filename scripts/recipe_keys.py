"""Update the tables of keys in recipes/README.md from the recipes' schemas.

python scripts/recipe_keys.py
"""

import argparse
import sys
from collections.abc import Sequence

from eval.command import Parser, exit_status
from heads.files import write_text
from train.usage import PAGE


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, which has no options."""
    return Parser("Write the tables of keys in recipes/README.md anew.").parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    parse_arguments(arguments)
    from train.recipe_keys import with_tables

    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
