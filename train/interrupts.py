"""SIGTERM and Ctrl-C: held back while a step is made, at once where nothing would be lost."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; says at which step. No Exception, so that only the loop and the entry catch it."""


class Interrupts:
    """Handlers for the time of a `with` block.

    A signal raises Interrupted where it falls; inside `held()` it only sets `asked`, for the loop to see between two
    steps. A launcher often sends a second signal after the first, so repeats are ignored; a second Ctrl-C is the user's
    way to insist.
    """

    def __init__(self) -> None:
        self.asked = False
        self._held = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Steps and checkpoints: signals wait."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @contextmanager
    def released(self) -> Iterator[None]:
        """A long measurement between two steps: signals cut it short."""
        held, self._held = self._held, 0
        try:
            if self.asked:
                raise Interrupted
            yield
        finally:
            self._held = held

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if (again and number == signal.SIGINT) or (not again and not self._held):
            raise Interrupted
