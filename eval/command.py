"""What the commands share: arguments that are refused in one line, and the exit status.

A command reads its arguments before it imports what does the work: torch and transformers take seconds to import, and
neither --help nor a mistyped option is to wait for them. So an entry, and all that it imports at its top, this file
among them, imports none of them (tests/test_start.py); its run function imports the rest.
"""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from eval.files import is_full_disk
from eval.runtime.sampling import Sampling
from heads.base import HEAD_TREE, shape_for
from heads.errors import UserError, first_line
from heads.tree import TreeShape

AUTO = "auto"
"""In the place of a tree, or of a backend: look for the best."""
BACKENDS = ("huggingface", "torch", "cpu", "triton")


class _Formatter(argparse.HelpFormatter):
    """Defaults are told where they say something, as they would be typed."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default in ([], argparse.SUPPRESS) or not action.help:
            return action.help
        text = ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)
        return f"{action.help} (default: {text.replace('%', '%%')})"


class Parser(argparse.ArgumentParser):
    """A command line that is refused in one line, as a recipe is; `--help` has the rest."""

    def __init__(self, description: str):
        super().__init__(description=description, formatter_class=_Formatter)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see --help")


def count(text: str) -> int:
    """A whole number from 1 up."""
    return _at_least(1, text)


def seed(text: str) -> int:
    """A whole number from 0 up."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {number}")
    return number


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 up, commas between."""
    return tuple(count(part) for part in text.split(","))


def temperatures(text: str) -> tuple[float, ...]:
    """Temperatures, commas between."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between, got {text!r}") from None
    with _told():
        return tuple(Sampling(temperature).temperature for temperature in found)


def temperature(text: str) -> float:
    """One temperature."""
    found = temperatures(text)
    if len(found) > 1:
        raise argparse.ArgumentTypeError(f"expected one number, got {text!r}")
    return found[0]


def trees(text: str) -> tuple[str, ...]:
    """Trees that draft something, or `auto`, commas between."""
    parts = [part.strip() for part in text.split(",")]
    with _told():
        draft_shapes([part for part in parts if part not in (AUTO, HEAD_TREE)])
    return tuple(parts)


def draft_tree(text: str) -> str:
    """One tree that drafts something."""
    found = trees(text)
    if len(found) > 1 or AUTO in found:
        raise argparse.ArgumentTypeError(f"expected one tree, such as chain:5, got {text!r}")
    return found[0]


def draft_shapes(texts: Sequence[str], head: object = None) -> list[TreeShape]:
    """The shapes that texts name for a head. UserError for one that drafts nothing."""
    shapes = [shape_for(text, head) for text in texts]
    if any(shape.nodes == 1 for shape in shapes):
        raise UserError("expected trees that draft something, such as chain:5; plain decoding is always measured")
    return shapes


@contextmanager
def _told() -> Iterator[None]:
    """UserErrors as argparse wants to hear them: it takes any other ValueError for one that says nothing."""
    try:
        yield
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Options that say how a target is loaded."""
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="to compute in"
    )
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--backend", default=AUTO, choices=[AUTO, *BACKENDS], help="the code that decodes")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")
    parser.add_argument(
        "--quantize", choices=["none", "int8"], help="the target's layers; by default as the head was trained"
    )


HEAD_HELP = "a run directory, a head's directory or a hub id; or lookup:NGRAM, early_exit:LAYERS, which need --target"


def add_head_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The head, and options that say how its target is loaded."""
    parser.add_argument("head", nargs="?" if optional else None, help=HEAD_HELP)
    parser.add_argument("--target", help="the target's path; by default the one the head was trained for")
    add_target_options(parser)


def asks_usage(usage: str, arguments: Sequence[str], *, keys: Callable[[], str]) -> bool:
    """Print the usage of a command that takes a recipe, and the recipe's keys, where --help is asked for; True then.

    UserError if there are no arguments."""
    if not arguments:
        raise UserError(f"{usage}; --help lists the keys")
    if arguments[0] in ("-h", "--help"):
        print(f"{usage}\n\n{keys()}")
        return True
    return False


def tell(text: str | None) -> None:
    """Say on standard error what there is to say, once where every process of a launch says it."""
    if text and os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def exit_status(act: Callable[[], int], say: Callable[[str], None] = tell) -> int:
    """What `act` returns, or the status of what it raises: 2 and a line for what a user can mend, 130, or 1."""
    # transformers imports torchao wherever it is installed, for seconds and with four lines of warnings.
    # `heads.target.quantization`, which has a use for it, takes it back.
    sys.modules.setdefault("torchao", None)  # type: ignore[arg-type] # typeshed does not know that None hides a module
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # in a locale that lacks a table's lines, figures are told without them
        sys.stdout.reconfigure(errors="replace")
    try:
        return act()
    except UserError as error:
        refusal = str(error)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except Exception as error:
        from eval.runtime.memory import is_out_of_memory  # which needs torch, and a command that broke had it

        if is_full_disk(error):
            refusal = f"no space left on the device ({error}); free some and run the same command again"
        elif is_out_of_memory(error):
            refusal = f"the memory does not suffice ({first_line(error)}); ask for less, or for smaller batches"
        else:
            say(traceback.format_exc().rstrip())
            return 1
    say("\n".join(f"error: {line}" for line in refusal.splitlines()))
    return 2
