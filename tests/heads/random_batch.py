"""What the tests of several heads train and draft on."""

import torch

from heads.base import Batch, TargetEnds


def random_batch(documents: list[list[int]], *, width: int, vocab: int, taps: int = 0, labels_from: int = 3) -> Batch:
    """Rows of documents of the given lengths, random features, float64; labels from each document's `labels_from`-th
    token on."""
    torch.manual_seed(2)
    B, T = len(documents), sum(documents[0])
    table, out = torch.randn(2, vocab, width, dtype=torch.float64)
    tokens = torch.randint(0, vocab, (B, T))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in documents])
    return Batch(
        tokens=tokens,
        loss_mask=positions >= labels_from,
        positions=positions,
        documents=ids,
        embeddings=table[tokens],
        taps=torch.randn(B, T, taps * width, dtype=torch.float64),
        hidden=torch.randn(B, T, width, dtype=torch.float64),
        ends=TargetEnds(embed=lambda ids: table[ids], logits=lambda hidden: hidden @ out.T, weight=out),
    )
