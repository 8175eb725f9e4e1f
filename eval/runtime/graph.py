"""CUDA graphs of rounds: one for each extent and form of sampling, replayed without synchronising host and device.

A round has static shapes, keeps its state in static tensors and never waits for the host, so that it can be captured
once and replayed. A graph fixes the host's decisions: the number of slots visible to attention, and whether any row
samples, filters or has a penalty. So there is one graph for each combination that occurs. Extents are powers of two, so
they are few; kernels that read lengths on the device need only one. All graphs share one memory pool, because no two
run at once. If a round cannot be captured, rounds run without graphs.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from eval.runtime.round import Decoder
from eval.runtime.round_state import RoundState
from heads.core.errors import first_line

SMALLEST_EXTENT = 256
WARM_UPS = 2
logger = logging.getLogger("draftsmith")

Form = tuple[bool, bool, bool]
"""Host flags: does any row sample, does any filter, and has any a penalty?"""


Capture = Callable[[Callable[[], None]], Any]
"""Function that captures work and returns its graph, whose `replay` runs the work again, on the same memory."""


class Rounds:
    def __init__(self, decoder: Decoder, capture: Capture | None) -> None:
        """If `capture` is None, every round runs without a graph."""
        self.decoder = decoder
        self.capture = capture
        self.graphs: dict[tuple[int, Form], Any] = {}

    def __call__(self, extent: int) -> None:
        """Advance every row that is not done, as `Decoder.round` does."""
        sampling = self.decoder.sampling
        form = sampling.random, sampling.filtered, sampling.penalised
        if self.capture is not None and (self.bucket(1), form) not in self.graphs:
            self.record(form)
        if self.capture is None:
            self.decoder.round(extent)
        else:
            self.graphs[self.bucket(extent), form].replay()

    def bucket(self, extent: int) -> int:
        capacity = self.decoder.target.spec.capacity
        if not self.decoder.target.reads_masks:
            return capacity
        return min(max(SMALLEST_EXTENT, 1 << (extent - 1).bit_length()), capacity)

    def record(self, form: Form) -> None:
        """Capture one form of sampling in all extents, so that no request waits for a capture later."""
        assert self.capture is not None
        trouble = None
        extent = 0
        with preserved(self.decoder.state):
            self.decoder.state.done.fill_(True)  # so that the rounds of the warm-up change no row
            try:
                while extent < self.decoder.target.spec.capacity:
                    extent = self.bucket(extent + 1)
                    work = partial(self.decoder.round, extent)
                    for _ in range(WARM_UPS):
                        work()
                    self.graphs[extent, form] = self.capture(work)
            except RuntimeError as error:
                trouble = "the GPU is out of memory" if is_out_of_memory(error) else first_line(error)
        if trouble is not None:  # outside the except block: the error would keep the round's tensors alive
            self.graphs.clear()
            self.capture = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            logger.warning(
                "rounds cannot be captured as CUDA graphs (%s): they are launched one by one, slower", trouble
            )


@contextmanager
def preserved(state: RoundState) -> Iterator[None]:
    """Restore the state of the rows on exit, whatever was done to them."""
    before = {field.name: getattr(state, field.name).clone() for field in fields(state)}
    try:
        yield
    finally:
        for name, value in before.items():
            getattr(state, name).copy_(value)


class CudaCapture:
    """Capture on a separate stream, with one pool for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()  # warms up this stream: a capture fails if it uses a workspace or module for the first time
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use CUDA meanwhile (data loaders pin memory, for example).
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
        return graph


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or an error in its chain of causes, says that memory ran out. A failed allocation during
    capture surfaces as an error of the capture. A CPU's allocator says so only in its message."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
