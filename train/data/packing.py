"""Documents packed into rows of equal length, and which rows each step of each process sees.

The order of the data is a pure function of (seed, step, process), so a resumed run needs nothing but its step number.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PATTERN = 1000
"""Rows over which the shares of several pools are met exactly."""


@dataclass(frozen=True)
class Document:
    """Token ids and, for each of them, whether it is a label: a token that the head learns to foresee."""

    ids: NDArray[np.int32]
    labels: NDArray[np.bool_]

    def __post_init__(self) -> None:
        assert self.ids.shape == self.labels.shape, (self.ids.shape, self.labels.shape)


@dataclass(frozen=True)
class Rows:
    """Packed rows on the CPU."""

    tokens: Tensor  # (B, T) int64; 0 in the padding
    loss_mask: Tensor  # (B, T) bool, indexed by the label
    positions: Tensor  # (B, T) int64, from 0 in each document
    documents: Tensor  # (B, T) int64, numbered from 0 in each row; -1 = padding


def empty_rows(B: int, T: int) -> Rows:
    """Nothing but padding."""
    return Rows(
        tokens=torch.zeros(B, T, dtype=torch.int64),
        loss_mask=torch.zeros(B, T, dtype=torch.bool),
        positions=torch.zeros(B, T, dtype=torch.int64),
        documents=torch.full((B, T), -1),
    )


class Pool:
    """Documents of one source, packed into as few rows as best fit finds, or each in rows of its own; no token is left
    out."""

    def __init__(self, documents: Sequence[Document], row_length: int, *, packs: bool = True):
        self.row_length, self.packs = row_length, packs
        self.tokens = np.concatenate([document.ids for document in documents])
        self.labels = np.concatenate([document.labels for document in documents])
        self.rows = best_fit([len(document.ids) for document in documents], row_length)
        if not packs:
            self.rows = [[piece] for row in self.rows for piece in row]

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Rows:
        """One packed row by itself."""
        out = empty_rows(1, self.row_length)
        self.fill(index, 0, out)
        return out

    def fill(self, index: int, row: int, out: Rows) -> None:
        """Write packed row `index` into row `row` of `out`."""
        at = 0
        for number, (start, length) in enumerate(self.rows[index]):
            piece = slice(at, at + length)
            out.tokens[row, piece] = torch.from_numpy(self.tokens[start : start + length].astype(np.int64))
            out.loss_mask[row, piece] = torch.from_numpy(self.labels[start : start + length])
            out.positions[row, piece] = torch.arange(length)
            out.documents[row, piece] = number
            at += length

    def digest(self) -> str:
        """A hash of every token, label and boundary."""
        digest = hashlib.sha256(self.tokens.tobytes() + self.labels.tobytes())
        digest.update(np.array([self.row_length, *map(len, self.rows)]).tobytes())
        digest.update(np.array([piece for row in self.rows for piece in row]).tobytes())
        return digest.hexdigest()


def best_fit(lengths: Sequence[int], row_length: int) -> list[list[tuple[int, int]]]:
    """Rows of (start, length) pieces; `start` counts from the first document's first token.

    A document longer than a row is cut into whole rows and a rest. Longest first, each piece goes to the fullest row
    that still holds it: fewer documents are cut than by cutting one long stream, at a few per cent of padding.
    """
    pieces, start = [], 0
    for length in lengths:
        pieces += [(start + at, min(row_length, length - at)) for at in range(0, length, row_length)]
        start += length
    pieces.sort(key=lambda piece: (-piece[1], piece[0]))
    rows: list[list[tuple[int, int]]] = []
    open_rows: dict[int, list[int]] = {}  # free space -> the rows that have it
    spaces: list[int] = []  # the keys of open_rows, ascending
    for piece in pieces:
        found = bisect_left(spaces, piece[1])
        if found == len(spaces):
            row, space = len(rows), row_length
            rows.append([])
        else:
            space = spaces[found]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space]
                spaces.pop(found)
        rows[row].append(piece)
        if left := space - piece[1]:
            if left not in open_rows:
                open_rows[left] = []
                insort(spaces, left)
            open_rows[left].append(row)
    return rows


class Mixture:
    """Pools drawn from by weight, without end, each shuffled anew every time it has been gone through."""

    def __init__(self, pools: Sequence[Pool], weights: Sequence[float], seed: int):
        assert pools and len(pools) == len(weights), (len(pools), len(weights))
        self.pools = list(pools)
        self.seed = seed
        self.counts = shares(weights, PATTERN)
        self._permutation = lru_cache(maxsize=4 * len(pools))(self._shuffle)
        self._pattern = lru_cache(maxsize=4)(self._arrange)

    def batch(
        self, step: int, micro: int, process: int, *, batch_size: int, num_micro: int, num_processes: int
    ) -> Rows:
        """The rows of one forward pass."""
        first = ((step * num_micro + micro) * num_processes + process) * batch_size
        return self.rows(range(first, first + batch_size))

    def rows(self, indices: Sequence[int]) -> Rows:
        """Rows by their place in the endless order."""
        out = empty_rows(len(indices), self.pools[0].row_length)
        for row, index in enumerate(indices):
            pool, place = self.locate(index)
            self.pools[pool].fill(place, row, out)
        return out

    def locate(self, index: int) -> tuple[int, int]:
        """(pool, row of the pool) of a place in the endless order."""
        block, offset = divmod(index, PATTERN)
        owners, ranks = self._pattern(block)
        pool = int(owners[offset])
        epoch, place = divmod(block * self.counts[pool] + int(ranks[offset]), len(self.pools[pool]))
        return pool, int(self._permutation(pool, epoch)[place])

    def label_counts(self, vocab_size: int) -> Tensor:
        """(V,) int64: how often each token is a label, over all pools."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for pool in self.pools:
            counts += np.bincount(pool.tokens[pool.labels], minlength=vocab_size)
        return torch.from_numpy(counts)

    def digest(self) -> str:
        text = "".join(pool.digest() for pool in self.pools) + repr((self.counts, self.seed))
        return hashlib.sha256(text.encode()).hexdigest()

    def _arrange(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each offset of a block: its pool, and how many rows of that pool came before it in the block."""
        owners = np.repeat(np.arange(len(self.pools)), self.counts)
        np.random.default_rng((self.seed, 1, block)).shuffle(owners)
        ranks = np.zeros_like(owners)
        for pool, count in enumerate(self.counts):
            ranks[owners == pool] = np.arange(count)
        return owners, ranks

    def _shuffle(self, pool: int, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, 2, pool, epoch)).permutation(len(self.pools[pool]))


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to the weights that add up to `total`, each at least 1 (largest remainders)."""
    exact = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(part)) for part in exact]
    order = sorted(range(len(weights)), key=lambda n: counts[n] - exact[n])
    for n in range(total - sum(counts)):
        counts[order[n % len(order)]] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts
