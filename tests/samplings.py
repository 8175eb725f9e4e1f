"""The sampling settings of a batch's rows, and the integer arithmetic of their noise."""

from typing import TypeVar

from eval.runtime.distribution import RowSampling
from eval.runtime.sampling import Sampling

Rows = TypeVar("Rows", bound=RowSampling)
MASK, GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15


def rows_of(kind: type[Rows], *samplings: Sampling) -> Rows:
    rows = kind(len(samplings))
    for row, sampling in enumerate(samplings):
        rows.set_row(row, sampling)
    return rows


def splitmix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31
