"""Memory-mapped weights: all processes of a machine share the pages that they have read."""

import ctypes
import mmap
import sys
from bisect import bisect_right
from pathlib import Path

from torch import Tensor

MAPS = Path("/proc/self/maps")
DONT_NEED = 4  # MADV_DONTNEED, Linux's number on every machine


class MappedFiles:
    """Files that this process had mapped at construction. Empty if the system does not list them."""

    def __init__(self) -> None:
        lines = MAPS.read_text().splitlines() if sys.platform == "linux" and MAPS.is_file() else []
        fields = [line.split(maxsplit=5) for line in lines]
        files = [field for field in fields if len(field) == 6 and field[4] != "0"]  # field 4 is the file's inode
        self.regions = sorted((int(low, 16), int(high, 16)) for low, high in (field[0].split("-") for field in files))

    def forget(self, tensor: Tensor) -> None:
        """Release the pages of a CPU tensor if it is in a mapped file. They are read again when needed."""
        start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        place = bisect_right(self.regions, (start, sys.maxsize)) - 1
        if tensor.device.type != "cpu" or place < 0 or start + size > self.regions[place][1]:
            return
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONT_NEED)
