"""Packed rows of several documents, with padding at the end."""

import torch

from heads.core.contract import Rows
from train.data.packing import empty_rows


def packed_rows(vocab_size: int = 128, lengths: tuple[tuple[int, ...], ...] = ((20, 9), (31,))) -> Rows:
    """Return random rows of 32 tokens, with documents of these lengths."""
    rows, draw = empty_rows(len(lengths), 32), torch.Generator().manual_seed(0)
    for row, documents in enumerate(lengths):
        begin = 0
        for number, length in enumerate(documents):
            place = slice(begin, begin + length)
            rows.tokens[row, place] = torch.randint(6, vocab_size, (length,), generator=draw)
            rows.positions[row, place] = torch.arange(length)
            rows.documents[row, place] = number
            rows.loss_mask[row, place] = True
            begin += length
    return rows
