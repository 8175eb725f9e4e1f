"""Progress of long phases on standard error: a bar on a terminal, and lines elsewhere, such as in the log of a job."""

import math
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, ClassVar, Self

from tqdm import tqdm

MIN_GAP = 12.0
"""Seconds between two lines with figures."""
MAX_SILENCE = 15.0
"""Seconds without any line."""
STEADY = 0.25
"""Share of the time left, newly estimated, in which this estimate replaces most of the one before: it does not jump."""
MIN_WAIT = 1.0
"""Seconds between two checks of whether a line is due."""
BAR_FORMAT = "{n_fmt}/{total_fmt} {bar} {desc}"
"""The numbers come before the bar: they fit into 80 columns, and the bar takes the remaining width."""


class Progress:
    """Progress of one phase, from its creation to `close` or the end of a `with` block. Only rank 0 of a launch shows
    it, and of nested phases only the innermost one prints lines."""

    open_phases: ClassVar[list["Progress"]] = []
    last_line: ClassVar[float] = time.monotonic()
    """When the newest line of any phase was printed, or this module was imported."""

    def __init__(
        self, what: str, total: int | None = None, *, done: int = 0, announced: bool = False, cold: bool = False
    ):
        """`what`: the phase, and the name of its unit if it has a `total`. `announced`: print nothing at the start.
        `cold`: the first unit is slower than the others, and the estimate of the time left leaves it out."""
        self.what = what
        self.total = total
        self.done = done
        self.cold = cold
        self.note = ""
        """Figures shown after the number of units."""
        self.more = 0.0
        """Seconds of phases within this one that are still to come."""
        self._within = 0.0
        """Seconds that phases within this one took, which are no part of a unit's time."""
        self._began = self._since = self._last = time.monotonic()
        self._base = done
        self._end: tuple[float, float] | None = None
        """Shown time of the end, and when it was estimated."""
        self._logged: float | None = None
        self._told = self._began
        self._bar: tqdm[Any] | None = None
        self._ended = threading.Event()
        if os.environ.get("RANK", "0") != "0":
            self._ended.set()
            return
        Progress.open_phases.append(self)
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, desc=what, file=sys.stderr, dynamic_ncols=True, leave=False)
            self._bar.bar_format = BAR_FORMAT if total is not None else "{desc}"
            return
        if not announced:
            self._print()
        threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def advance(self, count: int = 1) -> None:
        self.done += count
        self._last = self._now()
        if self.cold:
            self.cold = False
            self._since = self._last
            self._base = self.done
        if self._bar is not None:
            self._bar.set_description_str(self._with_time(self.what, self.note), refresh=False)
            self._bar.update(count)

    def tell(self, figures: str) -> None:
        """Keep figures of units that are not done yet: the next line shows them, or the bar, once a second."""
        self.note = figures
        now = time.monotonic()
        if self._bar is not None and now - self._told >= MIN_WAIT:
            self._told = now
            self._bar.set_description_str(self._with_time(self.what, figures))

    def log(self, figures: str) -> None:
        """Show figures of the units done. A line is skipped if the one before it was printed a moment ago, unless it
        is the first or the last one."""
        now = time.monotonic()
        if self._bar is not None:
            self.note = figures
            self._bar.set_description_str(self._with_time(figures))
        elif self._logged is None or self.done == self.total or now - self._logged >= MIN_GAP:
            self._logged = now
            self._print(figures)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        Progress.last_line = time.monotonic()
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the phase. May be called twice."""
        self._ended.set()
        if self in Progress.open_phases:
            Progress.open_phases.remove(self)
            for outer in Progress.open_phases[-1:]:
                outer._within += time.monotonic() - self._began
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _now(self) -> float:
        """Return the time of a clock that stood still in phases within this one."""
        return time.monotonic() - self._within

    def seconds_left(self) -> float | None:
        units = self.done - self._base
        if self.total is None or units == 0:
            return None
        now = self._now()
        remaining = self.total - self.done
        end = max(now, self._last + (self._last - self._since) / units * remaining)
        if self._end is not None and remaining:
            before, at = self._end
            end += (before - end) * math.exp((at - now) / (MIN_GAP + STEADY * (end - now)))
        self._end = end, now
        return max(0.0, end - now) + self.more

    def _print(self, figures: str | None = None) -> None:
        place = "" if self.total is None else f" {self.done:,}/{self.total:,}"
        line = self._with_time(self.what + place, self.note if figures is None else figures)
        Progress.last_line = time.monotonic()
        sys.stderr.write(line + "\n")  # in one piece, since two threads print
        sys.stderr.flush()

    def _with_time(self, *parts: str) -> str:
        left = self.seconds_left()
        spent = self._now() - self._since
        clock = ""
        if left is not None:
            clock = f"{tqdm.format_interval(left)} left"
        elif spent >= 1 and self._base == self.done:
            clock = f"{tqdm.format_interval(spent)} so far"
        return ", ".join(part for part in (*parts, clock) if part)

    def _watch(self) -> None:
        """Print a line whenever there has been none for a while. It shows that a long unit is still at work."""
        while not self._ended.wait(max(MIN_WAIT, Progress.last_line + MAX_SILENCE - time.monotonic())):
            if Progress.open_phases[-1:] == [self] and time.monotonic() - Progress.last_line >= MAX_SILENCE:
                self._print()
