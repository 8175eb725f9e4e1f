"""Faults during a run: a signal, a loss that is not a number, a full disk, little memory."""

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from train.features.feature_source import make_batch
from train.steps.parallel import LossModule


@contextmanager
def signal_at(call: int, number: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    """Send this process a signal during its `call`-th forward pass of training."""
    calls = iter(range(1, 1_000))

    def make(*arguments: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return make_batch(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.steps.stepper.make_batch", make)
        yield


@contextmanager
def nan_at(call: int) -> Iterator[None]:
    """Make the `call`-th loss of training NaN."""
    calls, forward = iter(range(1, 1_000)), LossModule.forward

    def make(module: LossModule, *arguments: Any) -> Any:
        loss, *others = forward(module, *arguments)
        return (loss * float("nan") if next(calls) == call else loss, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossModule, "forward", make)
        yield


@contextmanager
def full_disk(step: int) -> Iterator[None]:
    """Simulate a full disk when the optimizer's state is written in the checkpoint of `step`."""
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
def small_files(most: int) -> Iterator[None]:
    """Limit the files that this process writes to `most` bytes, like a disk quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def little_memory() -> Iterator[None]:
    """Simulate too little memory for a copy of any target."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.features.feature_source.ROOM", 1e9)
        yield
