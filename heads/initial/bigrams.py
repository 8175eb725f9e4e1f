"""A Markov head that begins as the target's own bigrams: what the target expects behind a token, by the token alone.

Of the matrix of those logits, (h_a - mean h) . w_b for tokens a and b, the best one of rank r is kept, errors counted
by the frequencies of both tokens. Both factors follow from matrices (D, D), so that no (V, V) is ever made.

Letters: V vocabulary, D hidden, N probed slots, M tokens in them, r rank.
"""

import torch
from torch import Tensor

from heads.initial.weights import TargetProbe

PART = 0.5
"""Part of the bigrams' logits that the head begins with: the rows learn some of it from the context."""
ROWS = 2**14
"""Rows of the output head in one product."""


@torch.no_grad()
def bigrams(probe: TargetProbe, rank: int) -> tuple[Tensor, Tensor]:
    """Return W1 (V, r) and W2 (V, r), float32 on the CPU. Row a of W1 W2^T is `PART` of the target's logits behind
    token a less those behind any token; zeros for tokens that the probed text does not have."""
    V, D = probe.readout.shape
    tokens, states = probe.tokens[:, 1:].flatten(), probe.hidden[:, 1:].flatten(0, 1).float()  # (N,), (N, D)
    present, by_slot, count = tokens.unique(return_inverse=True, return_counts=True)
    share = count / len(tokens)
    behind = states.new_zeros(len(present), D).index_add(0, by_slot, states) / count[:, None]  # (M, D)
    behind = behind - share @ behind

    # The logits of two states differ, by the frequencies of tokens, as far as the two are apart after `metric`.
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
    scale = latent.square().mean().sqrt().clamp_min(1e-6) * rank**0.5  # rows of W1 of unit size
    w1, w2 = states.new_zeros(2, V, rank)
    w1[:, kept:].normal_(std=rank**-0.5)  # columns to spare learn only if one factor of them is not 0
    w1[present, :kept] = latent / scale
    w2[:, :kept] = PART * scale * (probe.readout @ (inverse @ axes))
    return w1, w2
