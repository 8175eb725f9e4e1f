"""Documents packed into rows of equal length, in an endless order that is a pure function of the seed.

So a resumed run needs only its step number.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heads.core.contract import Rows
from train.data.corpus import Corpus

PATTERN = 1000
"""Rows of one block. Each block has exactly the same number of rows of each pool."""


def empty_rows(B: int, T: int) -> Rows:
    return Rows(
        tokens=torch.zeros(B, T, dtype=torch.int64),
        loss_mask=torch.zeros(B, T, dtype=torch.bool),
        positions=torch.zeros(B, T, dtype=torch.int64),
        documents=torch.full((B, T), -1),
    )


def text_rows(texts: Sequence[Sequence[int]], length: int | None = None) -> Rows:
    """Return one text per row, without labels, padded to `length`, by default the length of the longest text."""
    rows = empty_rows(len(texts), length or max(map(len, texts)))
    for n, text in enumerate(texts):
        T = len(text)
        rows.tokens[n, :T] = torch.tensor(text)
        rows.positions[n, :T] = torch.arange(T)
        rows.documents[n, :T] = 0
    return rows


class Pool:
    """Documents of one source, packed into rows by best fit, or each in its own rows. No label within the models'
    positions is left out.

    Pieces are (start, length, position, context): the index of the first token in the corpus, the number of tokens, the
    position of the first token, and the number of tokens that are only context of the piece's labels.
    """

    def __init__(self, corpus: Corpus, row_length: int, num_positions: int | None = None, *, packs: bool = True):
        """`num_positions`: the number of positions of the models; None: enough for any document. `packs`: several
        documents may share a row."""
        self.corpus = corpus
        self.row_length = row_length
        self.packs = packs
        pieces, self.num_left_out = _pieces(corpus, row_length, num_positions or corpus.num_tokens)
        rows = best_fit(pieces[:, 1], row_length) if packs else np.arange(len(pieces))
        order = np.argsort(rows, kind="stable")
        self.pieces = pieces[order]
        self.ends = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 1), side="right")

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, index: int) -> Rows:
        out = empty_rows(1, self.row_length)
        self.fill(index, 0, out)
        return out

    def fill(self, index: int, row: int, out: Rows) -> None:
        at = 0
        pieces = self.pieces[self.ends[index - 1] if index else 0 : self.ends[index]]
        for number, (start, length, position, context) in enumerate(pieces.tolist()):
            piece = slice(at, at + length)
            tokens, labels = self.corpus.span(start, length)
            out.tokens[row, piece] = torch.from_numpy(tokens.astype(np.int64))
            out.loss_mask[row, piece] = torch.from_numpy(labels.copy())
            out.loss_mask[row, at : at + context] = False
            out.positions[row, piece] = torch.arange(position, position + length)
            out.documents[row, piece] = number
            at += length

    def digest(self) -> str:
        parts = np.array([self.row_length, *self.pieces.shape, *self.ends]).tobytes() + self.pieces.tobytes()
        return hashlib.sha256(self.corpus.digest.encode() + parts).hexdigest()


def _pieces(corpus: Corpus, row_length: int, num_positions: int) -> tuple[NDArray[np.int64], int]:
    """Return (P, 4) the pieces into which the documents are cut, longest first, and the number of labels that are in no
    piece."""
    lengths = np.diff(corpus.ends, prepend=0)
    starts = corpus.ends - lengths
    short = lengths <= row_length
    whole = np.stack([starts[short], lengths[short], *np.zeros((2, short.sum()), dtype=np.int64)], axis=1)
    cut = []
    left_out = 0
    for start, length in zip(starts[~short].tolist(), lengths[~short].tolist(), strict=True):
        labels = corpus.span(start, length)[1]
        parts = list(cut_document(labels, row_length, num_positions))
        cut += [(start + begin, end - begin, position, context) for begin, end, position, context in parts]
        left_out += int(labels.sum()) - sum(
            int(labels[begin + context : end].sum()) for begin, end, _, context in parts
        )
    pieces = np.concatenate([whole, np.array(cut, dtype=np.int64).reshape(-1, 4)])
    return pieces[np.lexsort((pieces[:, 0], -pieces[:, 1]))], left_out


def cut_document(labels: NDArray[np.bool_], row_length: int, num_positions: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (begin, end, position, context) of the parts of a document with these labels that is longer than a row.

    A text, where every token is a label, is cut into whole rows and a rest. A conversation is cut after answers. Each
    part except the first begins with up to half a row of the tokens before its own tokens, as context; this context
    begins after an answer if one ends in it. Positions continue over all parts. Parts without labels are left out. An
    answer longer than a row is cut inside.
    """
    if labels.all():
        yield from ((at, min(at + row_length, len(labels)), 0, 0) for at in range(0, len(labels), row_length))
        return
    length = min(len(labels), num_positions)
    answer_ends = np.append(np.flatnonzero(labels[: length - 1] & ~labels[1:length]) + 1, length)
    begin = done = 0
    while done < length:
        fitting = answer_ends[(answer_ends > done) & (answer_ends <= begin + row_length)]
        end = int(fitting[-1]) if len(fitting) else begin + row_length
        if labels[done:end].any():
            yield begin, end, begin, done - begin
        done = end
        # If a row cannot hold both, the next answer takes precedence over its context.
        later = answer_ends[answer_ends > done]
        room = int(later[0]) - row_length if len(later) and later[0] - row_length <= done else 0
        begin = max(done - row_length // 2, room)
        inside = answer_ends[(answer_ends >= begin) & (answer_ends < done)]
        begin = int(inside[0]) if len(inside) else begin


def best_fit(lengths: NDArray[np.int64], row_length: int) -> NDArray[np.int64]:
    """Return the row of each piece, for pieces of at most `row_length` tokens, longest first.

    Each piece is put into the fullest row that has room for it. This cuts fewer documents than cutting one long stream,
    and costs a few per cent of padding.
    """
    rows = np.empty(len(lengths), dtype=np.int64)
    count = 0
    open_rows: dict[int, list[int]] = {}  # free space -> the rows with that much free space
    spaces: list[int] = []  # the keys of open_rows, ascending
    for piece, length in enumerate(lengths.tolist()):
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row = count
            space = row_length
            count += 1
        else:
            space = spaces[at]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space]
                spaces.pop(at)
        rows[piece] = row
        if left := space - length:
            if left not in open_rows:
                open_rows[left] = []
                insort(spaces, left)
            open_rows[left].append(row)
    return rows


class Mixture:
    """An endless sequence of rows from several pools, drawn by weight. Each pool is shuffled again after each epoch."""

    def __init__(self, pools: Sequence[Pool], weights: Sequence[float], seed: int):
        assert pools and len(pools) == len(weights), (len(pools), len(weights))
        self.pools = list(pools)
        self.row_length = pools[0].row_length
        self.seed = seed
        self.num_texts = 0
        """Number of conversations or texts from which the rows were made; 0: not counted."""
        self.counts = shares(weights, PATTERN)
        self._permutation = lru_cache(maxsize=4 * len(pools))(self._shuffle)
        self._pattern = lru_cache(maxsize=4)(self._arrange)

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.pools))

    def rows(self, indices: Sequence[int]) -> Rows:
        out = empty_rows(len(indices), self.row_length)
        for row, index in enumerate(indices):
            pool, place = self.locate(index)
            self.pools[pool].fill(place, row, out)
        return out

    def locate(self, index: int) -> tuple[int, int]:
        """Return (pool, row of the pool) for an index in the endless order."""
        block, offset = divmod(index, PATTERN)
        owners, ranks = self._pattern(block)
        pool = int(owners[offset])
        epoch, place = divmod(block * self.counts[pool] + int(ranks[offset]), len(self.pools[pool]))
        return pool, int(self._permutation(pool, epoch)[place])

    def label_counts(self, vocab_size: int) -> Tensor:
        """Return (V,) int64: how often each token is a label, over all pools."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for pool in self.pools:
            seen = pool.corpus.counts[1]
            counts[: len(seen)] += seen
        return torch.from_numpy(counts)

    def rows_digest(self) -> str:
        """Return a hash of the rows of all pools, independent of the order in which they are drawn."""
        return hashlib.sha256("".join(pool.digest() for pool in self.pools).encode()).hexdigest()

    def digest(self) -> str:
        text = "".join(pool.digest() for pool in self.pools) + repr((self.counts, self.seed))
        return hashlib.sha256(text.encode()).hexdigest()

    def _arrange(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pool of each offset of a block, and how many rows of that pool came before it in the block."""
        owners = np.repeat(np.arange(len(self.pools)), self.counts)
        np.random.default_rng((self.seed, 1, block)).shuffle(owners)
        ranks = np.zeros_like(owners)
        for pool, count in enumerate(self.counts):
            ranks[owners == pool] = np.arange(count)
        return owners, ranks

    def _shuffle(self, pool: int, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, 2, pool, epoch)).permutation(len(self.pools[pool]))


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Return integers in proportion to the weights, each at least 1, with the sum `total` (largest remainders)."""
    exact = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(part)) for part in exact]
    order = sorted(range(len(weights)), key=lambda n: counts[n] - exact[n])
    for n in range(total - sum(counts)):
        counts[order[n % len(order)]] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts
