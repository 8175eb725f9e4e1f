"""SIGTERM and SIGHUP end a command as Ctrl-C does."""

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANGUP_MS = 200
"""Time in which the programs of a closed terminal end."""


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM and SIGHUP, unless they are handled otherwise, such as by nohup."""

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in taken:  # a launcher often sends a second one, which must not end what the first began
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGHUP:
            leave_terminal()
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    taken = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def leave_terminal() -> None:
    """Discard further output to a terminal that is gone, or to a program that ended with it, such as tee: a line that
    cannot be printed must not cost what was made."""
    for stream in (1, 2):
        closed = select.poll()
        closed.register(stream, 0)
        if closed.poll(HANGUP_MS):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
