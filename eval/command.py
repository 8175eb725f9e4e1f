"""What the commands share: arguments that are refused in one line, opening a head and its target, the exit status."""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from eval.environment import setup_line
from eval.files import is_full_disk
from eval.runtime.memory import is_out_of_memory
from eval.runtime.sampling import Sampling
from heads.base import Drafter
from heads.checkpoint import adapt_target, check_fits, find_head, load_head, read_config
from heads.encoder_decoder import give_template
from heads.errors import UserError, first_line
from heads.own_tree import HEAD_TREE, shape_for
from heads.quantization import SCHEMES
from heads.registry import build_untrained, untrained_kind
from heads.target import FrozenTarget, load_target, load_tokenizer
from heads.tree import TreeShape

AUTO = "auto"
"""In the place of a tree: look for the best."""


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


def trees(text: str) -> tuple[str, ...]:
    """Trees that draft something, or `auto`, commas between."""
    parts = [part.strip() for part in text.split(",")]
    with _told():
        draft_shapes([part for part in parts if part not in (AUTO, HEAD_TREE)])
    return tuple(parts)


def draft_shapes(texts: Sequence[str], head: object = None) -> list[TreeShape]:
    """The shapes that texts name for a head. UserError for one that drafts nothing."""
    shapes = [shape_for(text, head) for text in texts]
    if any(shape.nodes == 1 for shape in shapes):
        raise UserError("expected trees that draft something, such as chain:5; plain decoding is always measured")
    return shapes


def device(text: str) -> torch.device:
    """A device that this machine has."""
    try:
        found = torch.device(text)
        torch.ones(1, device=found).item()
    except (RuntimeError, AssertionError, NotImplementedError):  # each backend says in its own way that it is not there
        raise argparse.ArgumentTypeError(f"expected a device of this machine, such as cpu, got {text!r}") from None
    return found


@contextmanager
def _told() -> Iterator[None]:
    """UserErrors as argparse wants to hear them: it takes any other ValueError for one that says nothing."""
    try:
        yield
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class Opened:
    """A head with the target it was trained for."""

    head: Drafter
    target: FrozenTarget
    tokenizer: PreTrainedTokenizerBase


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Options that say how a target is loaded."""
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="to compute in"
    )
    parser.add_argument("--device", type=device, help="cuda where there is one, else cpu")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")
    parser.add_argument(
        "--quantize", choices=["none", *SCHEMES], help="the target's layers; by default as the head was trained"
    )


HEAD_HELP = "a run directory, a head's directory or a hub id; or lookup:NGRAM, early_exit:LAYERS, which need --target"


def add_head_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The head, and options that say how its target is loaded."""
    parser.add_argument("head", nargs="?" if optional else None, help=HEAD_HELP)
    parser.add_argument("--target", help="the target's path; by default the one the head was trained for")
    add_target_options(parser)


def open_head(options: argparse.Namespace) -> Opened:
    """Load the head that the command line names, and its target."""
    target, tokenizer = open_target_of(options.head, options)
    return Opened(fitting_head(options.head, target), target, tokenizer)


def open_target_of(head: str, options: argparse.Namespace) -> tuple[FrozenTarget, PreTrainedTokenizerBase]:
    """Load the target of a head: as it was trained for, its adapter taken in, where the command line says no other."""
    path = options.target or target_path(head)
    if untrained_kind(head):
        return open_target(path, options)
    trained_as = read_config(find_head(head))["target"].get("quantize")
    target, tokenizer = open_target(path, options, quantize=trained_as)
    adapt_target(head, target)
    return target, tokenizer


def target_path(head: str) -> str:
    """The target that a head was trained for. UserError where it does not say."""
    if untrained_kind(head):
        raise UserError(f"{head}: drafts for any target; give --target")
    folder = find_head(head)
    path = read_config(folder)["target"]["name"]
    if not isinstance(path, str):
        raise UserError(f"{folder}: does not say which target it was trained for; give --target")
    return path


def fitting_head(head: str, target: FrozenTarget) -> Drafter:
    """The head that a text names, trained or not. UserError if it was trained for another target."""
    if untrained_kind(head):
        return cast(Drafter, build_untrained(head, target))
    folder = find_head(head)
    check_fits(folder, target)
    return cast(Drafter, load_head(folder, dtype=target.dtype, device=target.device))


def open_target(
    path: str, options: argparse.Namespace, *, quantize: str | None = None
) -> tuple[FrozenTarget, PreTrainedTokenizerBase]:
    """Load a target as the command line says; `quantize`: how, where it does not."""
    place = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scheme = options.quantize or quantize
    target, tokenizer = load_pair(
        path,
        dtype=options.dtype,
        device=place,
        trust_remote_code=options.trust_remote_code,
        quantize=None if scheme == "none" else scheme,
    )
    tell(setup_line(target))
    return target, tokenizer


def load_pair(
    path: str, *, dtype: str, device: torch.device, trust_remote_code: bool, quantize: str | None = None
) -> tuple[FrozenTarget, PreTrainedTokenizerBase]:
    """A target and the tokenizer beside it. dtype `auto` keeps what it was saved in, but float32 on a CPU, where less
    is slower."""
    wanted = getattr(torch, dtype) if dtype != "auto" else torch.float32 if device.type == "cpu" else None
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it reports absent weights at length; load_target says it in one line
    try:
        target = load_target(path, dtype=wanted, device=device, trust_remote_code=trust_remote_code, quantize=quantize)
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        if tokenizer.vocab_size > target.vocab_size:  # tokens added to it may lie beyond, where none is ever used
            raise UserError(
                f"{path}: its tokenizer has {tokenizer.vocab_size} tokens and its output head {target.vocab_size}; put "
                "the model's own tokenizer beside it"
            )
        if target.start_token is not None:
            give_template(tokenizer, target.start_token)
        return target, tokenizer
    finally:
        transformers_logging.set_verbosity(level)


def prompt_room(target: FrozenTarget, max_new_tokens: int, most_nodes: int) -> int:
    """How long a prompt may be. UserError if there is no room for any."""
    room = target.context_length - max_new_tokens - most_nodes
    if room < 1:
        raise UserError(
            f"{max_new_tokens} new tokens and a tree of {most_nodes} nodes leave no room for a prompt in the "
            f"{target.context_length} positions of {target.name}; ask for fewer new tokens"
        )
    return room


def asks_usage(usage: str, arguments: Sequence[str]) -> bool:
    """Whether a command that takes a recipe is asked how it is called; tells it. UserError if it is given nothing."""
    if not arguments:
        raise UserError(usage)
    if arguments[0] in ("-h", "--help"):
        print(usage)
        return True
    return False


def tell(text: str | None) -> None:
    """Say on standard error what there is to say, once where every process of a launch says it."""
    if text and os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def exit_status(act: Callable[[], int], say: Callable[[str], None] = tell) -> int:
    """What `act` returns, or the status of what it raises: 2 and a line for what a user can mend, 130, or 1."""
    transformers_logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, where a library imports it, else looks for a GPU
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
        if is_full_disk(error):
            refusal = f"no space left on the device ({error}); free some and run the same command again"
        elif is_out_of_memory(error):
            refusal = f"the memory does not suffice ({first_line(error)}); ask for less, or for smaller batches"
        else:
            say(traceback.format_exc().rstrip())
            return 1
    say("\n".join(f"error: {line}" for line in refusal.splitlines()))
    return 2
