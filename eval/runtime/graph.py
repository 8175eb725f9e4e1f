"""Rounds as CUDA graphs: one for each extent and form of sampling, replayed without a word between host and device.

A round has static shapes, keeps its state in static tensors and never asks the host, so that it can be captured once
and replayed. What the host decides is frozen in a graph: the slots shown (kernels look at what is there, and need no
telling), and whether any row samples or filters. So there is a graph for each combination that occurs, its extents few
(powers of two), all in one pool of memory, since no two run at once. Where a round cannot be captured, rounds are
called plainly.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Protocol

import torch

from eval.runtime.round import Decoder
from heads.backends.torch.commit import RoundState
from heads.errors import first_line

SMALLEST_EXTENT = 256
WARM_UPS = 2
logger = logging.getLogger("draftsmith")

Form = tuple[bool, bool]
"""Host flags: does any row sample, and does any filter?"""


class Graph(Protocol):
    """A graph that `Capture` makes."""

    def replay(self) -> None:
        """Run the captured work again, on the same memory."""


Capture = Callable[[Callable[[], None]], Graph]
"""Records work without running it."""


class Rounds:
    """Rounds of one decoder."""

    def __init__(self, decoder: Decoder, capture: Capture | None) -> None:
        """With `capture` None, every round is called without a graph."""
        self.decoder, self.capture = decoder, capture
        self.graphs: dict[tuple[int, Form], Graph] = {}

    def __call__(self, extent: int) -> None:
        """Advance every row that is not done, as `Decoder.round` does."""
        self.prepare()
        if self.capture is None:
            self.decoder.round(extent)
        else:
            self.graphs[self.bucket(extent), self.form].replay()

    @property
    def form(self) -> Form:
        """Return the form of sampling of the current rows."""
        return self.decoder.sampling.random, self.decoder.sampling.filtered

    def prepare(self) -> None:
        """Capture the form of sampling of the current rows, unless that was done before."""
        if self.capture is not None and (self.bucket(1), self.form) not in self.graphs:
            self.record(self.form)

    def bucket(self, extent: int) -> int:
        """Return the smallest captured extent that covers `extent` slots."""
        if not self.decoder.step.decoder.reads_masks:
            return self.decoder.step.capacity
        return min(max(SMALLEST_EXTENT, 1 << (extent - 1).bit_length()), self.decoder.step.capacity)

    def extents(self) -> list[int]:
        """Return every captured extent."""
        capacity, extents = self.decoder.step.capacity, [self.bucket(1)]
        while extents[-1] < capacity:
            extents.append(self.bucket(extents[-1] + 1))
        return extents

    def record(self, form: Form) -> None:
        """Capture one form of sampling in all extents, so that no text waits for it later."""
        assert self.capture is not None
        trouble = None
        with preserved(self.decoder.state):
            self.decoder.state.done.fill_(True)  # a row that is done stays as it is, whatever rounds warm up
            try:
                for extent in self.extents():
                    for _ in range(WARM_UPS):
                        self.decoder.round(extent)
                    self.graphs[extent, form] = self.capture(lambda extent=extent: self.decoder.round(extent))  # type: ignore[misc]
            except RuntimeError as error:
                trouble = "the GPU has no memory left for them" if is_out_of_memory(error) else first_line(error)
        if trouble is not None:  # and the error forgotten, which held on to all that the round had made
            self.give_up(trouble)

    def give_up(self, reason: str) -> None:
        """Free the graphs, and go on without them."""
        self.graphs.clear()
        self.capture = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning("rounds cannot be captured as CUDA graphs (%s): they are launched one by one, slower", reason)


@contextmanager
def preserved(state: RoundState) -> Iterator[None]:
    """Put the rows back afterwards, whatever was done to them."""
    before = {field.name: getattr(state, field.name).clone() for field in fields(state)}
    try:
        yield
    finally:
        for name, value in before.items():
            getattr(state, name).copy_(value)


class CudaCapture:
    """Capture on a separate stream, with one pool for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()  # workspaces and modules belong to a stream: what is first used in a capture fails it
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile (data loaders pin memory, say) is no concern of the capture's.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
        return graph


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or the error that caused it, says that memory ran out. A failed allocation during a
    graph's capture ends in an error of the capture. A CPU's allocator says so in its text alone."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
