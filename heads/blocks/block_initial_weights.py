"""Initial weights of heads that draft a block, computed from the target's features over some text: a head that copies
what followed the root the last time, and a Markov head that knows the target's bigrams.

Letters: B rows, T tokens, N probed slots, D hidden, L auxiliary layers, V vocabulary, d head dimension, m dimensions in
which tokens are matched, r rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from heads.parts.initial_weights import (
    AttentionProbe,
    TargetProbe,
    directions,
    least_squares,
    matched_dimensions,
    principal_axes,
    token_axes,
)
from heads.parts.layers import Attention

# Initial weights of a Markov head: the target's bigrams, which are its mean logits after each token. The matrix of
# these logits is (h_a - mean h) . w_b for tokens a and b. The head gets its best approximation of rank r, with errors
# weighted by the frequencies of both tokens. Both factors come from (D, D) matrices; no (V, V) matrix is formed.

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
    mean = probe.frequency @ probe.readout
    gram = states.new_zeros(D, D)
    for rows, weight in zip(probe.readout.split(ROWS), probe.frequency.split(ROWS), strict=True):
        centred = (rows - mean) * weight.sqrt()[:, None]
        gram += centred.T @ centred
    values, vectors = torch.linalg.eigh(gram)
    size = values.clamp_min(1e-6 * values[-1]).sqrt()
    metric = vectors * size @ vectors.T
    inverse = vectors / size @ vectors.T
    seen = behind @ metric
    width = min(rank, D)
    axes = torch.linalg.eigh((seen.T * share) @ seen).eigenvectors[:, -width:]  # (D, width)

    latent = seen @ axes
    scale = latent.square().mean().sqrt().clamp_min(1e-6) * rank**0.5  # rows of W1 have unit size
    w1, w2 = states.new_zeros(2, V, rank)
    w1[:, width:].normal_(std=rank**-0.5)  # spare columns can only learn if one factor is not 0
    w1[present, :width] = latent / scale
    w2[:, :width] = PART * scale * (probe.readout @ (inverse @ axes))
    return w1, w2


# A block head that copies: its first draft token is what followed the root the last time. Attention that copies needs a
# query that knows the root, but the rows that draft are masks. So three parts are prepared by least squares:
#
# 1. For each slot, the context keeps the token before it, its own token and the target's highest auxiliary state.
# 2. In the first layer a row reads the row that is `first_row` before it in its block. For the row of the first draft
#    token that is the root. The row writes the root's token where the output head hardly looks. Other rows read masks.
# 3. In the second layer a row that knows the root finds the slots after the same token, and writes their own tokens.
#
# A row that finds nothing predicts the frequencies of tokens in the data. Without this, the first steps of training
# unlearn what the mask's embedding happens to predict, and what was prepared along with it.

PLACES = 2
"""Number of rotary pairs, the fastest ones, by which a row finds another row by its position."""
SHARP = 2.5
"""Scale of the first layer's queries. At d = 64 a row gives its neighbour e^-5 of the weight of the row that it looks
for."""
WRITTEN = 2.0
"""Size of a copied token, relative to a residual stream of 1."""

# Sizes that a norm or another matrix cancels. Their only effect is that the optimizer, whose updates all have one size,
# changes these weights relatively less.
LARGE = 40.0
"""Size of the first layer's queries and keys before their norms."""
CONTEXT = 3.0
"""Size of the context before its norm."""
VALUE = 4.0
"""Size of the values that rows read from each other. The output projection divides by it."""


@torch.no_grad()
def copy_by_root(head: Any, probe: TargetProbe) -> tuple[Attention, AttentionProbe]:
    """Prepare the context, the first layer and the final norm of a head whose weights are small and random. Return the
    second layer's attention, and the probe of what it should find and write."""
    for layer in head.layers:  # only the weights prepared here write anything
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    second = head.layers[1]
    D = head.config.hidden_size
    d = head.config.head_dim
    attention: Attention = second.self_attn
    heads = attention.k_proj.out_features // d
    attention.q_proj.weight.view(heads, -1, d, D)[:, 0, matched_dimensions(d)] = 0  # without a root, nothing is sought

    read = head.layers[0].input_layernorm(probe.embeddings[:, :-1]).flatten(0, 1)  # (N, D), token before each slot
    written = WRITTEN * directions(probe.lm_head_weight, probe.tokens[:, 1:].flatten())
    by_token = read @ token_axes(attention, read)
    keep_in_context(head, probe, torch.cat([by_token, written @ principal_axes(written, heads * d)], 1))
    context = head.fuse(probe.aux_hidden_states[:, 1:]).flatten(0, 1)

    prior, scale = frequencies(probe)
    head.norm.weight.copy_(probe.norm * probe.logit_scale * scale)
    rows = read_root(head, probe, by_token[:, : min(D // 4, heads * d - 2)], context, prior)
    return attention, AttentionProbe(second.input_layernorm(rows), context, read=read, before=read, written=written)


def keep_in_context(head: Any, probe: TargetProbe, wanted: Tensor) -> None:
    """Set `fc` so that `wanted` (N, W) can be read from the context, for all slots but the first of a text, in at most
    half of the D dimensions. The other dimensions hold the target's highest auxiliary state."""
    D = head.config.hidden_size
    B = len(probe.tokens)
    aux = probe.aux_hidden_states.float() / probe.scales.repeat_interleave(D)  # (B, T, L * D)
    slots = aux[:, 1:].flatten(0, 1)
    found = least_squares(slots, wanted)  # (L * D, W)
    found = found @ principal_axes(slots @ found, min(wanted.shape[1], D // 2))
    highest = principal_axes(aux[..., -D:].flatten(0, 1), D - found.shape[1])
    weights = torch.cat([found, pad(highest, (0, 0, len(found) - D, 0))], 1)  # (L * D, D)
    sizes = (aux.view(B * aux.shape[1], -1) @ weights).square().mean(0).sqrt().clamp_min(1e-6)
    head.fc.weight.copy_(CONTEXT * (weights / sizes).T * probe.evening)


def frequencies(probe: TargetProbe) -> tuple[Tensor, float]:
    """Return a state (D,) of unit size and a factor of the final norm with which its logits give nearly the frequencies
    of tokens in the data."""
    state = torch.zeros_like(probe.norm, requires_grad=True)
    optimizer = torch.optim.LBFGS([state], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        read = (probe.readout @ (probe.norm * state)).log_softmax(-1)
        value: Tensor = -(probe.frequency * read).sum() + 1e-3 * state.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    found = state.detach()
    scale = float(found.square().mean().sqrt().clamp_min(1e-6))
    return found / scale, scale


def read_root(head: Any, probe: TargetProbe, by_token: Tensor, context: Tensor, prior: Tensor) -> Tensor:
    """Make the first layer's rows read the row `first_row` before them. Return the residual stream (N, D) after that
    layer in the row of the first draft token, for each root.

    by_token (N, m): distinguishes the roots; context (N, D); prior (D,): replaces a mask in the residual stream.
    """
    layer = head.layers[0]
    D = head.config.hidden_size
    d = head.config.head_dim
    attention = layer.self_attn
    N, m = by_token.shape
    roots = probe.embeddings[:, :-1].flatten(0, 1)
    mask_id = torch.tensor([head.config.mask_token_id], device=probe.lm_head_weight.device)
    mask = probe.embed_tokens(mask_id)[0].float().cpu()
    root = layer.input_layernorm(roots)
    rows = torch.cat([root, layer.input_layernorm(mask).expand(N // 2, -1)])  # of blocks: roots and masks
    ones = torch.ones(len(rows), 1)
    masked = (torch.arange(len(rows)) >= N).float()[:, None]
    always, is_mask = least_squares(rows, torch.cat([ones, masked], 1)).T
    of_block = least_squares(torch.cat([rows, context]), torch.cat([ones, -torch.ones(N, 1)]))[:, 0]

    # The slowest rotary pair separates rows of blocks from the context; the fastest pairs separate positions of rows.
    angles = head.cos_sin(torch.tensor([[head.first_row]]), torch.float32)
    heads = attention.k_proj.out_features // d
    half = angles[0].shape[-1] // 2
    still = half - 1
    places = torch.arange(min(PLACES, still))
    cos, sin = (x[0, 0, 0, places + half] for x in angles)
    q, k = (proj.weight.view(heads, -1, d, D)[:, 0] for proj in (attention.q_proj, attention.k_proj))
    k[:, still] = k[:, places] = LARGE * of_block
    q[:, still] = LARGE * always
    q[:, places] = LARGE * cos[:, None] * always
    q[:, places + half] = -LARGE * sin[:, None] * always
    attention.q_norm.weight *= SHARP

    token = least_squares(rows, torch.cat([by_token, torch.zeros(len(rows) - N, m)]))  # (D, m): zeros for a mask
    values = torch.cat([token, always[:, None], (always if head.first_row else is_mask)[:, None]], 1)  # (D, m + 2)
    gram = probe.norm[:, None] * (probe.readout.T @ probe.readout) * probe.norm
    quiet = torch.linalg.eigh(gram).eigenvectors[:, :m]
    into = torch.cat([quiet, prior[:, None], -mask[:, None]], 1)  # (D, m + 2)
    attention.v_proj.weight[: m + 2] = VALUE * values.T
    by_head = pad(into / VALUE, (0, heads * d - m - 2)).view(D, heads, d)
    attention.o_proj.weight.view(D, heads, -1, d)[:, :, 0] = by_head
    return (mask if head.first_row else roots) + root @ values @ into.T  # type: ignore[no-any-return]
