"""What the measuring commands share: how a head and its target are named on the command line, and the exit status."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from heads.base import DraftHead
from heads.checkpoint import check_fits, find_head, load_head, read_config
from heads.errors import UserError
from heads.target import FrozenTarget, load_target, load_tokenizer


@dataclass(frozen=True)
class Opened:
    """A head with the target it was trained for."""

    folder: Path
    head: DraftHead
    target: FrozenTarget
    tokenizer: PreTrainedTokenizerBase


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Options that say how a target is loaded."""
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="to compute in"
    )
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")


def add_head_options(parser: argparse.ArgumentParser) -> None:
    """The head, and options that say how its target is loaded."""
    parser.add_argument("head", help="a run directory, a head's directory or a hub id")
    parser.add_argument("--target", help="the target's path; by default the one the head was trained for")
    add_target_options(parser)


def open_head(options: argparse.Namespace) -> Opened:
    """Load the head that the command line names, and its target."""
    folder = find_head(options.head)
    target, tokenizer = open_target(options.target or read_config(folder)["target"]["name"], options)
    check_fits(folder, target)
    return Opened(folder, load_head(folder, dtype=target.dtype, device=target.device), target, tokenizer)


def open_target(path: str, options: argparse.Namespace) -> tuple[FrozenTarget, PreTrainedTokenizerBase]:
    """Load a target as the command line says."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    trust = options.trust_remote_code
    target = load_target(path, dtype=pick_dtype(options.dtype, device), device=device, trust_remote_code=trust)
    return target, load_tokenizer(path, trust_remote_code=trust)


def pick_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """`auto` keeps what the target was saved in, but float32 on a CPU, where less is slower."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def exit_status(act: Callable[[], int]) -> int:
    """What `act` returns; 2 with one line for what the caller can mend, 130 for an interrupt."""
    try:
        return act()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
