"""Helpers shared by all commands: parsing of arguments, with errors in one line, and the exit status.

A command parses its arguments before it imports torch and transformers, which takes seconds: --help and an error in an
option should be immediate. So an entry and its top-level imports, this file included, do not import torch or
transformers (tests/test_start.py). The entry's `main` imports the rest once the arguments are parsed.
"""

import argparse
import io
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from eval.core.signals import as_interrupts
from heads.core.contract import HEAD_TREE, Drafter, shape_for
from heads.core.errors import UserError, first_line
from heads.core.files import expanded, is_full_disk
from heads.core.tree import TreeShape

AUTO = "auto"
"""Value of an option that lets the program choose: search for the fastest tree."""
OFF = "off"
"""Value of --wandb, the default."""
ASKING, ALL = {"-h", "--help"}, "all"
OURS = ("heads", "eval", "train", "scripts")
UNREAD = 128 + signal.SIGPIPE
"""Exit status if the reader of the output has closed it: the one that shells report for other programs."""


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are UserErrors of one line without the usage."""

    def __init__(self, description: str, *, first: Collection[str] = ()):
        """`first`: the options that --help explains, if it is to be one screen; `--help all` explains all."""
        super().__init__(description=description)
        self.register("type", Path, lambda text: Path(place(text)))
        self.first = first

    def parse_known_args(self, args: Any = None, namespace: object = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if self.first and ASKING.intersection(words):
            print(self.format_help() if ALL in words else self.format_screen())
            self.exit()
        return super().parse_known_args(words, namespace)

    def format_screen(self) -> str:
        """Return the help of the `first` options, and the names of the others."""
        formatter = self._get_formatter()
        shown = [action for action in self._actions if not action.option_strings or action.dest in self.first]
        others = [action.option_strings[-1] for action in self._actions if action not in shown]
        formatter.add_usage(f"{self.prog} [options] ...", [], [])
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments(shown)
        formatter.end_section()
        formatter.add_text(f"and {', '.join(others[1:])}: --help {ALL} explains them")
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see --help")


def place(text: str) -> str:
    """Parse an option that is a path, or a name on the Hub."""
    try:
        return expanded(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def is_tuple(hint: object) -> bool:
    return get_origin(get_args(hint)[0] if get_origin(hint) is Annotated else hint) is tuple


def typed(hint: Any) -> Callable[[str], object]:
    """Return a function that parses an option as a type, with its bounds. Items of a tuple are separated by commas."""
    adapter = TypeAdapter(hint)

    def parse(text: str) -> object:
        try:
            return adapter.validate_python(text.split(",") if is_tuple(hint) else text)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]["msg"]
            raise argparse.ArgumentTypeError(fault.removeprefix("Value error, ")) from None

    return parse


def draft_shapes(texts: Sequence[str], head: Drafter | None = None) -> list[TreeShape]:
    """Return the tree shapes with these names for a head. Raise UserError for a shape without draft tokens."""
    shapes = [shape_for(text, head) for text in texts]
    if any(shape.nodes == 1 for shape in shapes):
        raise UserError("expected trees that draft something, such as chain:5; plain decoding is always measured")
    return shapes


def check_depths(texts: Sequence[str] | None, max_new_tokens: int) -> None:
    """Raise UserError for a tree named on the command line whose paths are longer than an answer."""
    for text in texts or ():
        if text not in (AUTO, HEAD_TREE) and (depth := shape_for(text, None).depth) > max_new_tokens:
            raise UserError(
                f"--tree {text}: drafts {depth} tokens a round, more than the {max_new_tokens} of an answer "
                "(--max-new-tokens); ask for a shorter draft or longer answers"
            )


def template_arguments(text: str) -> dict[str, bool | int | float | str]:
    """Parse NAME=VALUE, separated by commas. Values are JSON's true, false and numbers; everything else is text."""
    arguments = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not (equals and name.isidentifier()):
            raise argparse.ArgumentTypeError(f"expected NAME=VALUE, such as enable_thinking=false, got {part!r}")
        try:
            read = json.loads(value, parse_constant=str)  # NaN and Infinity are text, too
        except (ValueError, RecursionError):
            read = value
        arguments[name] = read if isinstance(read, bool | int | float) else value
    return arguments


def add_target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="number type to compute in; default: %(default)s",
    )
    parser.add_argument("--device", help="such as cuda or cpu; default: cuda if there is a GPU, else cpu")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    parser.add_argument(
        "--fix-mistral-regex",
        type=typed(bool),
        metavar="true|false",
        help="replace the pattern by which the tokenizer splits text, as transformers offers for Mistral's older "
        "files; default: as in the head's training, else it stays",
    )
    parser.add_argument(
        "--quantize", choices=["none", "int8"], help="quantise the target's layers; default: as in the head's training"
    )
    parser.add_argument(
        "--template",
        type=template_arguments,
        metavar="NAME=VALUE",
        help="arguments of the target's chat template, separated by commas, such as enable_thinking=false; '' for "
        "none; default: those that the head was trained with",
    )


HEAD_HELP = (
    "a run's folder, a head's folder or a Hub id; or lookup:NGRAM, ngram:NGRAM, early_exit:LAYERS, which need "
    "--target; or lookup:M+HEAD: prompt lookup after a match of M tokens, else the head"
)


def add_head_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    if several:
        parser.add_argument("heads", type=place, nargs="*", metavar="head", help=HEAD_HELP)
    else:
        parser.add_argument("head", type=place, help=HEAD_HELP)
    parser.add_argument(
        "--target", type=place, help="folder or Hub id of the target; default: that of the (first) head"
    )
    add_target_options(parser)


def add_wandb_option(parser: argparse.ArgumentParser, what: str) -> None:
    modes = [OFF, "offline", "online"]
    parser.add_argument(
        "--wandb", choices=modes, default=OFF, help=f"{what}; default: %(default)s; WANDB_MODE, if it is set, wins"
    )


def asks_usage(usage: str, arguments: Sequence[str], *, keys: Callable[[], str], about: str = "") -> bool:
    """Handle --help of a command that reads a recipe, and return True: print its usage and what it is `about`, or with
    `--help all` also the recipe's keys. Return False for other arguments, and raise UserError if there are none."""
    if not arguments:
        raise UserError(f"{usage}; --help all lists the keys")
    if not ASKING.intersection(arguments):
        return False
    rest = keys() if ALL in arguments else f"--help {ALL} lists every key of the recipe, as recipes/KEYS.md does."
    print("\n\n".join(filter(None, (usage, about, rest))))
    return True


def print_line(text: str | None) -> None:
    """Print a line, unless it is empty, on standard error. Only rank 0 of a launch prints."""
    if text and os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def exit_status(act: Callable[[], int], say: Callable[[str], None] = print_line) -> int:
    """Return the result of `act`, or the exit status of its exception: 2, with one line, for an error that the user can
    fix; 130 for an interrupt, SIGTERM and SIGHUP included; 141, silently, if the reader of standard output has closed
    it; else 1."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # its retries are ten lines before the one that says why
    for name in ("torchao", "torch.utils._pytree"):  # if torchao is installed, transformers imports it, and it warns
        logging.getLogger(name).setLevel(logging.ERROR)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale may lack the lines of tables
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            with as_interrupts():
                status = act()
        except SystemExit as ended:
            if isinstance(ended.__context__, BrokenPipeError):  # raised by rich, which redirected output to /dev/null
                return UNREAD
            status = int(ended.code or 0)  # raised by argparse after --help
        print(end="", flush=True)  # here, because at exit the interpreter would only print an error
        return status
    except UserError as error:
        message = str(error)
    except KeyboardInterrupt as interrupted:
        say(f"interrupted{interrupted}")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the output
        return UNREAD
    except Exception as error:
        library = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
        if library and library not in OURS:  # a second import would fail for another reason
            say(f"error: {library} cannot be imported ({first_line(error)}): install draftsmith's packages again")
            return 2
        from eval.runtime.graph import is_out_of_memory  # imports torch, which a failed command has usually done

        if is_full_disk(error):
            message = f"no space left on the device ({error}); free some and rerun the command"
        elif is_out_of_memory(error):
            message = f"out of memory ({first_line(error)}); use smaller batches"
        else:
            say(traceback.format_exc().rstrip())
            return 1
    say("\n".join(f"error: {line}" for line in message.splitlines()))
    return 2
