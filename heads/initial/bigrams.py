"""First weights of a Markov head: the target's bigrams, which are its mean logits after each token.

The matrix of these logits is (h_a - mean h) . w_b for tokens a and b. The head gets its best approximation of rank r,
with errors weighted by the frequencies of both tokens. Both factors come from (D, D) matrices; no (V, V) matrix is
formed.

Letters: V vocabulary, D hidden, N probed slots, M tokens in them, r rank.
"""

import torch
from torch import Tensor

from heads.initial.weights import TargetProbe

PART = 0.5
"""Fraction of the bigrams' logits that the head begins with, because the rows learn some of it from the context."""
ROWS = 2**14
"""Number of rows of the output head in one product."""


@torch.no_grad()
def bigrams(probe: TargetProbe, rank: int) -> tuple[Tensor, Tensor]:
    """Return W1 (V, r) and W2 (V, r), float32 on the CPU. Row a of W1 W2^T is `PART` times the target's logits after
    token a, less those after any token. It is zero for tokens that do not occur in the probed text."""
    V, D = probe.readout.shape
    tokens, states = probe.tokens[:, 1:].flatten(), probe.hidden[:, 1:].flatten(0, 1).float()  # (N,), (N, D)
    present, by_slot, count = tokens.unique(return_inverse=True, return_counts=True)
    share = count / len(tokens)
    behind = states.new_zeros(len(present), D).index_add(0, by_slot, states) / count[:, None]  # (M, D)
    behind = behind - share @ behind

    # After `metric`, the distance of two states is that of their logits, weighted by the frequencies of tokens.
    mean, gram = probe.frequency @ probe.readout, states.new_zeros(D, D)
    for rows, weight in zip(probe.readout.split(ROWS), probe.frequency.split(ROWS), strict=True):
        centred = (rows - mean) * weight.sqrt()[:, None]
        gram += centred.T @ centred
    values, vectors = torch.linalg.eigh(gram)
    size = values.clamp_min(1e-6 * values[-1]).sqrt()
    metric, inverse = vectors * size @ vectors.T, vectors / size @ vectors.T
    seen, kept = behind @ metric, min(rank, D)
    axes = torch.linalg.eigh((seen.T * share) @ seen).eigenvectors[:, -kept:]  # (D, kept)

    latent = seen @ axes
    scale = latent.square().mean().sqrt().clamp_min(1e-6) * rank**0.5  # rows of W1 have unit size
    w1, w2 = states.new_zeros(2, V, rank)
    w1[:, kept:].normal_(std=rank**-0.5)  # spare columns can only learn if one factor is not 0
    w1[present, :kept] = latent / scale
    w2[:, :kept] = PART * scale * (probe.readout @ (inverse @ axes))
    return w1, w2
