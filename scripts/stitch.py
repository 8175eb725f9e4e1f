"""Put the modules of an MTP head into a copy of its target's checkpoint, in the place of the checkpoint's own.

    python scripts/stitch.py runs/mtp CHECKPOINT_FOLDER OUT

The copy is served, and loaded by transformers, as the checkpoint is; every tensor but the modules' is the checkpoint's
byte for byte. The target is loaded once, to check that the head is of its weights. OUT is new, and written whole or not
at all.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.command import Parser, exit_status
from heads.files import check_folder


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Put the modules of an MTP head into a copy of its target's checkpoint.")
    add = parser.add_argument
    add("head", help="run directory, folder or hub id of a head of kind mtp")
    add("target", help="folder of the target's checkpoint")
    add("out", type=Path, help="folder to create")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from heads.stitch import stitch

    check_folder(options.out, "OUT")
    files = stitch(options.head, options.target, options.out, trust_remote_code=options.trust_remote_code)
    print(f"written to {options.out}; what differs from {options.target}: {', '.join(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
