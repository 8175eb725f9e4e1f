"""Publish a run's head on the Hugging Face Hub, with its model card, in one commit.

    python scripts/publish.py runs/quickstart OWNER/NAME [--private] [--revision BRANCH] [--license apache-2.0]
    python scripts/publish.py runs/quickstart OWNER/NAME --dry-run        # what would be published; no network

The commit holds the head's folder, the card, results.json (without the texts of prompts) and recipe.yaml, all without
this machine's paths (`eval.pages.publication`). Every
command that takes a head then accepts OWNER/NAME. The card names the engines that serve the head, with their commands.
A head that no engine serves, or that one engine would misread, is refused without --unserved. The token comes from
`hf auth login` or HF_TOKEN.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, exit_status
from heads.targets.hub import is_hub_id


def hub_id(text: str) -> str:
    if "@" in text or not is_hub_id(text):
        raise argparse.ArgumentTypeError(f"expected OWNER/NAME on the Hub, and no folder here, got {text!r}")
    return text


def license_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text):
        raise argparse.ArgumentTypeError(f"expected a license as the Hub names it, such as apache-2.0, got {text!r}")
    return text


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Publish a run's head with its model card on the Hugging Face Hub.")
    add = parser.add_argument
    add("run", type=Path, help="a run's folder, or the head's folder in it")
    add("repo_id", type=hub_id, help="OWNER/NAME; created if it does not exist")
    add("--results", type=Path, metavar="FOLDER", help="measurement for the model card; default: the run's own")
    add("--private", action="store_true", help="if the repository is created, create it as private")
    add("--revision", metavar="BRANCH", help="branch to commit to, created if it does not exist; default: main")
    add("--license", type=license_name, help="for the model card, such as apache-2.0; default: the target's")
    add("--base-model", type=hub_id, help="the target's Hub id, if the head was trained on a local copy")
    add("--unmeasured", action="store_true", help="publish a head that was never measured; its card says so")
    add("--unserved", action="store_true", help="publish a head even if no engine serves it or one misreads it")
    add("--gguf", action="store_true", help="add the head as a GGUF file for llama.cpp, by its installed converter")
    add("--dry-run", action="store_true", help="list the files and print the model card, without network access")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.pages.upload import publish

    return publish(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
