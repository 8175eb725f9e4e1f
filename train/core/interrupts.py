"""Handling of SIGTERM, SIGHUP and Ctrl-C: deferred during a step, immediate where nothing would be lost."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from eval.core.signals import leave_terminal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A request to stop the run; its text names the step. It is not an Exception, so that only the loop and the entry
    catch it."""


class Interrupts:
    """Signal handlers that are installed for a `with` block.

    A signal raises Interrupted at once. Inside `held()` it only sets `asked`, which the loop reads between two steps.
    A launcher often sends a second signal after the first, so repeated signals are ignored, except a second Ctrl-C.
    SIGHUP stays ignored if it was, as under nohup.
    """

    def __init__(self) -> None:
        self.asked = False
        self._held = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        handled = [number for number in SIGNALS if not (under_nohup and number == signal.SIGHUP)]
        self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer signals, for steps and checkpoints."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let signals interrupt at once, for a long measurement between two steps."""
        held, self._held = self._held, 0
        try:
            if self.asked:
                raise Interrupted
            yield
        finally:
            self._held = held

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        again, self.asked = self.asked, True
        if (again and number == signal.SIGINT) or (not again and not self._held):
            raise Interrupted
