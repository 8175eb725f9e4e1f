"""Random batches that the tests of several heads share."""

import torch

from heads.base import Batch, SharedLayers


def random_batch(
    documents: list[list[int]], *, width: int, vocab: int, num_aux_layers: int = 0, labels_from: int = 3
) -> Batch:
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
        aux_hidden_states=torch.randn(B, T, num_aux_layers * width, dtype=torch.float64),
        hidden=torch.randn(B, T, width, dtype=torch.float64),
        shared=SharedLayers(
            embed_tokens=lambda ids: table[ids], lm_head=lambda hidden: hidden @ out.T, lm_head_weight=out
        ),
    )
