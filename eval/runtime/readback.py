"""What the host learns of rounds: read late, so that the device never waits for it.

A round ends by writing a report. The host has it copied to memory of its own, launches more rounds, and only then reads
it: by that time it has long arrived.

Letters: B rows, T tokens a report shows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Report:
    """One row, after a round."""

    done: bool
    output_length: int
    length: int
    tail: list[int]
    """The last tokens of the output, all of it where it is shorter than that."""


class Reports:
    """Places for the reports on their way, used in turn."""

    def __init__(self, source: Tensor, places: int) -> None:
        """source (B, 3 + T): the device's own, `RoundState.report`; places: reports on their way at once, at most."""
        cuda = source.is_cuda
        self.source = source
        self.places = [torch.empty(source.shape, dtype=source.dtype, pin_memory=cuda) for _ in range(places)]
        self.arrivals = [torch.cuda.Event() if cuda else None for _ in range(places)]
        self.sent = self.read = 0

    def send(self) -> None:
        """Have the report, as it stands after all that was launched, copied."""
        assert self.sent - self.read < len(self.places), (self.sent, self.read)
        place = self.sent % len(self.places)
        self.places[place].copy_(self.source, non_blocking=True)
        arrival = self.arrivals[place]
        if arrival is not None:
            arrival.record()
        self.sent += 1

    def receive(self) -> list[Report]:
        """Every row's report, the oldest one sent."""
        assert self.read < self.sent
        place = self.read % len(self.places)
        arrival = self.arrivals[place]
        if arrival is not None:
            arrival.synchronize()
        self.read += 1
        return [
            Report(bool(done), output_length, length, tail[max(0, len(tail) - output_length) :])
            for done, output_length, length, *tail in self.places[place].tolist()
        ]
