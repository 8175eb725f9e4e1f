"""Labels that a head is trained on. The loss mask is indexed by the label, and no head reads across documents.

Letters: B batch, T tokens, R supervised labels, K depths, C rows of a chunk, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from heads.core.contract import Batch, Rows
from heads.parts.part_settings import LABELS


def teacher(
    batch: Batch, row: Tensor, label: Tensor, loss: str, vocab_size: int
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return what a loss compares labels (row and position, (R,) each) with, as `heads.parts.losses.draft_loss` takes
    it: inputs (R, ...) and the function from them to logits (R, V). They are the target's hidden states and output
    head, or for the loss `labels` the labels and a target that is certain of them."""
    if loss != LABELS:
        return batch.hidden[row, label - 1], batch.shared.lm_head

    def certain(labels: Tensor) -> Tensor:
        return torch.zeros(len(labels), vocab_size, device=labels.device).scatter_(1, labels[:, None], 1e4)

    return batch.tokens[row, label], certain


def supervised(rows: Rows, ahead: int) -> Tensor:
    """Return (B, T) bool: True for labels whose slot, `ahead` tokens before, is in the same document."""
    document_of_slot = pad(rows.documents, (ahead, 0), value=-1)[:, : rows.tokens.shape[1]]
    return rows.loss_mask & (rows.documents == document_of_slot) & (rows.documents >= 0)


def counts_by_depth(rows: Rows, ahead: int, depth: int) -> Tensor:
    """Return (K,) float32: the number of labels of each depth k, whose slots are ahead + k tokens before them."""
    return torch.stack([supervised(rows, ahead + k).sum() for k in range(depth)]).float()


def label_slots(batch: Batch, ahead: int, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the labels of depth 0 (row and position, (R,) each), and for each depth k the slot ahead + k tokens
    before: slots (K, R), clamped to the row, and valid (K, R) bool, True if the slot is in the label's document."""
    row, label = supervised(batch, ahead).nonzero(as_tuple=True)
    k = torch.arange(depth, device=label.device)[:, None]
    slots = label - ahead - k
    inside = slots.clamp_min(0)
    valid = (slots >= 0) & (batch.documents[row, inside] == batch.documents[row, label])
    return row, label, inside, valid
