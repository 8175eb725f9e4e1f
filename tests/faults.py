"""Faults in the midst of a run: a signal, a full disk."""

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from train.features.batch import make_batch


@contextmanager
def signal_at(call: int, number: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    """Send this process a signal in the midst of its `call`-th forward pass of training."""
    calls = iter(range(1, 1_000))

    def make(*arguments: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return make_batch(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.step.make_batch", make)
        yield


@contextmanager
def full_disk(step: int) -> Iterator[None]:
    """Leave no space for the optimizer's states in the checkpoint of `step`."""
    write = Path.write_bytes

    def write_part(path: Path, data: bytes) -> int:
        full = path.parent.name == f".step-{step}.tmp" and path.name.startswith("optimizer")
        written = write(path, data[:100] if full else data)
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_part)
        yield


@contextmanager
def little_memory() -> Iterator[None]:
    """Leave no room for a copy of any target."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.features.base.ROOM", 1e9)
        yield
