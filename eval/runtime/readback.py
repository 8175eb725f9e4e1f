"""Results of rounds for the host, read late, so that the device never waits for it.

A round ends by writing a report. The host has it copied to memory of its own, launches more rounds, and only then reads
it: by that time it has long arrived.

Letters: B rows, T tokens a report shows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Report:
    """Report of one row after a round."""

    done: bool
    output_length: int
    length: int
    tail: list[int]
    """Last tokens of the output, or all of it if it is shorter."""


class Reports:
    """Buffers for reports under way, used in turn."""

    def __init__(self, source: Tensor, count: int) -> None:
        """source (B, 3 + T): `RoundState.report` on the device; count: maximum number of reports under way."""
        cuda = source.is_cuda
        self.source = source
        self.buffers = [torch.empty(source.shape, dtype=source.dtype, pin_memory=cuda) for _ in range(count)]
        self.arrivals = [torch.cuda.Event() if cuda else None for _ in range(count)]
        self.sent = self.read = 0

    def send(self) -> None:
        """Copy the report as it is after all work launched so far."""
        assert self.sent - self.read < len(self.buffers), (self.sent, self.read)
        index = self.sent % len(self.buffers)
        self.buffers[index].copy_(self.source, non_blocking=True)
        arrival = self.arrivals[index]
        if arrival is not None:
            arrival.record()
        self.sent += 1

    def receive(self) -> list[Report]:
        """Return every row's report, from the oldest unread copy."""
        assert self.read < self.sent
        index = self.read % len(self.buffers)
        arrival = self.arrivals[index]
        if arrival is not None:
            arrival.synchronize()
        self.read += 1
        return [
            Report(bool(done), output_length, length, tail[max(0, len(tail) - output_length) :])
            for done, output_length, length, *tail in self.buffers[index].tolist()
        ]
