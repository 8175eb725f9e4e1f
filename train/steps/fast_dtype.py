"""The dtype with the fastest matrix products on this machine, for work that need not be exact.

Training may run its products in bfloat16. On a GPU and on processors with bfloat16 instructions, bfloat16 is several
times faster than float32; on all other processors it is several times slower. No flag shows which case applies: a
library may use fewer instructions than the processor has, or emulate missing ones. So both dtypes are timed.

Two dtypes are not chosen here. A target decodes in its own dtype, float32 on a CPU. There `heads.kernels.product`
computes in float32 and holds a draft's weights in bfloat16. Each weight is widened with a shift, on any processor, and
a draft step of one row takes the time to read the weights.
"""

import platform
import time
from functools import cache
from statistics import median

import torch

GAIN = 1.3
"""Factor by which bfloat16 must be faster than float32 to be worth its rounding."""
REPEATS = 5
ROWS, WIDTH = 256, 512
"""Shape of the timed product, typical of a small head: 0.13 GFLOP, some milliseconds on a slow processor."""


@cache
def bfloat16_gain() -> float:
    """Return the factor by which a CPU's products are faster in bfloat16 than in float32, measured once in a
    process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one thread's own CPU time does not depend on other processes
    try:
        return _seconds(torch.float32) / _seconds(torch.bfloat16)
    finally:
        torch.set_num_threads(threads)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if its products are faster, else float32. A GPU is queried, a CPU is timed."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if platform.machine() == "x86_64" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return torch.float32  # attention in bfloat16 fails on a processor with AMX if torch does not use AVX-512
    return torch.bfloat16 if bfloat16_gain() >= GAIN else torch.float32


def _seconds(dtype: torch.dtype) -> float:
    """Return the shortest of several timings of one product, in seconds."""
    x, weight = (torch.ones(n, WIDTH, dtype=dtype) for n in (ROWS, WIDTH))

    def once() -> float:
        started = time.thread_time()
        torch.nn.functional.linear(x, weight)
        return time.thread_time() - started

    once()  # kernels are chosen and weights packed at the first call
    return min(once() for _ in range(REPEATS))


def measured_tflops(dtype: torch.dtype, rows: int, width: int, *, is_busy: bool = False) -> float:
    """Return the TFLOP/s of this process's threads in a product (rows, width) x (width, width), the median of half a
    second of timings. `is_busy`: others use the cores; return what one thread reaches in its own CPU time, times the
    number of threads, which does not depend on them."""
    x, weight = torch.ones(rows, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
    threads, clock = torch.get_num_threads(), time.thread_time if is_busy else time.perf_counter
    torch.set_num_threads(1 if is_busy else threads)
    try:
        torch.nn.functional.linear(x, weight)
        seconds, begun = [], time.perf_counter()
        while time.perf_counter() < begun + 0.5:
            started = clock()
            torch.nn.functional.linear(x, weight)
            seconds.append(clock() - started)
    finally:
        torch.set_num_threads(threads)
    return (threads if is_busy else 1) * 2e-12 * rows * width**2 / median(seconds)
