"""Labels that a head is trained on. The loss mask is indexed by the label, and no head looks across documents.

Letters: B batch, T tokens, R supervised labels, K depths, C rows of a chunk, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from heads.base import Batch

LABELS = "labels"
"""The loss that uses the tokens of the data and no distribution of the target: their cross-entropy."""


def certain_of_labels(vocab_size: int) -> Callable[[Tensor], Tensor]:
    """Return a function of labels (C,) that gives the logits (C, V) of a target that is certain of them. With it in
    place of the target, the loss `cross_entropy` is `labels`."""

    def logits(labels: Tensor) -> Tensor:
        return torch.zeros(len(labels), vocab_size, device=labels.device).scatter_(1, labels[:, None], 1e4)

    return logits


def supervised(loss_mask: Tensor, documents: Tensor, ahead: int, *, pad: bool = False) -> Tensor:
    """(B, T - ahead) bool: labels whose slot, `ahead` tokens before, lies in the same document; (B, T) with `pad`."""
    T = loss_mask.shape[1]
    document = documents[:, ahead:]
    mask = loss_mask[:, ahead:] & (document == documents[:, : max(T - ahead, 0)]) & (document >= 0)
    return padded(mask, (min(ahead, T), 0)) if pad else mask


def counts_by_depth(loss_mask: Tensor, documents: Tensor, ahead: int, depth: int) -> Tensor:
    """Return (K,) float32: the number of labels of each depth k, whose slots lie ahead + k tokens before them."""
    return torch.stack([supervised(loss_mask, documents, ahead + k).sum() for k in range(depth)]).float()


def label_slots(batch: Batch, ahead: int, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the labels of depth 0 (row and position, (R,) each), and for each depth k the slot ahead + k tokens
    before: slots (K, R), clamped to the row, and valid (K, R) bool, True if the slot lies in the label's document."""
    row, label = supervised(batch.loss_mask, batch.documents, ahead, pad=True).nonzero(as_tuple=True)
    slots = label - ahead - torch.arange(depth, device=label.device)[:, None]
    inside = slots.clamp_min(0)
    return row, label, inside, (slots >= 0) & (batch.documents[row, inside] == batch.documents[row, label])


def chain_metrics(
    correct: Tensor, valid: Tensor, overlap: Tensor, row: Tensor, slots: Tensor, shape: Any
) -> dict[str, Tensor]:
    """Compute the metrics of a HeadLoss: correct, valid (K, R) bool and overlap (K,) by label -> sums over rows of (B,
    T) `shape`. `accepted` counts the slots with correct guesses so far, `chains` those with labels so far."""
    hits, live = (_by_slot(x, row, slots, shape) for x in (correct & valid, valid))
    metrics = {
        "correct": hits.sum((1, 2)),
        "accepted": hits.cumprod(0).sum((1, 2)),
        "chains": live.cumprod(0).sum((1, 2)),
        "overlap": overlap,
    }
    return {name: value.float() for name, value in metrics.items()}


def _by_slot(values: Tensor, row: Tensor, slots: Tensor, shape: Any) -> Tensor:
    """(K, R) bool by label -> (K, B, T) int64 by the slot that predicts it."""
    K = len(values)
    grid = torch.zeros(K, *shape, dtype=torch.int64, device=values.device)
    depth = torch.arange(K, device=values.device)[:, None].expand_as(values)
    return grid.index_put_((depth, row.expand_as(values), slots), values.long(), accumulate=True)
