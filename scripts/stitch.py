"""Copy a target's checkpoint, with the modules of an MTP head in place of the checkpoint's own.

    python scripts/stitch.py runs/mtp CHECKPOINT_FOLDER OUT

Engines and transformers load the copy as they load the checkpoint. All tensors outside the modules are byte for byte
the checkpoint's. The target is loaded once to check that the head belongs to its weights. OUT must be new; it is
written completely or not at all.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, exit_status, place
from heads.core.files import check_folder


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Put the modules of an MTP head into a copy of its target's checkpoint.")
    add = parser.add_argument
    add("head", type=place, help="a run's folder, or the folder or Hub id of a head of kind mtp")
    add("target", type=place, help="folder of the target's checkpoint")
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
