"""Processes of a launch: work of the main process, and how processes end."""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported without being declared

from heads.core.errors import UserError
from train.core.interrupts import Interrupted

T = TypeVar("T")
LOST_PROCESS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exiting")
"""Texts in the error of a collective that failed because another process has ended. Neither gloo nor NCCL (the last
text) has an exception class for it."""


def is_launched() -> bool:
    return "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def on_main(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Run `action` on the main process, and return its result on all processes. A UserError, a lack of GPU memory or an
    interruption is raised on all of them, so that none is left waiting."""
    if accelerator.num_processes == 1:
        return action()
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = action()
        except (UserError, torch.OutOfMemoryError, Interrupted) as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def tell_first(text: str) -> None:
    """Print on standard error why this process ends, if it is the first process of its machine to end.

    The other processes end for the same reason, or because the launcher or a broken connection stops them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or _is_first_to_end():
        print(text, file=sys.stderr, flush=True)
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # the launcher ends its own report with the text in it
            Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))


def _is_first_to_end() -> bool:
    """Return True if no process of this launch on this machine has ended before. They count in the store that the
    launcher or the first process keeps. Without a store, return True."""
    launch = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK")]
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, is_master=False, timeout=timedelta(seconds=5))
        return bool(store.add("/".join(["draftsmith", "ended", *launch]), 1) == 1)
    except (KeyError, ValueError, RuntimeError):
        return True


def die_with_launcher() -> None:
    """Request SIGTERM for when the launcher dies: `accelerate launch` with one process does not pass signals on."""
    if is_launched() and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def leave(code: int) -> None:
    """End the process without interpreter shutdown, which sometimes aborts with its own status after distributed
    runs."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and code == 0:
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
