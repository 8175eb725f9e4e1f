"""Loss of draft blocks, in chunks of whole blocks.

As in `heads.losses`, no float32 tensor of (all rows) x (vocabulary) ever exists, and the gradient is taken while the
logits of a chunk are at hand. A chunk holds whole blocks, because a row's weight may follow from the draft's
probabilities in its whole block.

Letters: M blocks, C blocks of a chunk, K depth, D hidden, V vocabulary, r rank of the bias, P tokens of the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import vecdot
from torch.nn.functional import binary_cross_entropy_with_logits

from heads.labels import LABELS
from heads.losses import CHUNK_BYTES, LEAST_ROWS, LOSSES, Distribution, matmul

PACE = 0.5
"""Share of 1 that D-PACE mixes into the probability of each label (arXiv 2605.18810, alpha)."""


@dataclass(frozen=True, eq=False)
class BlockTask:
    """Labels of some blocks, and the loss at them."""

    labels: Tensor  # (M, K) int64, token ids
    valid: Tensor  # (M, K) bool, from the first row on up to some last one
    teacher: Tensor  # (M, K) int64, the row of `hidden` that predicts the label
    hidden: Tensor  # (P, D), the target's states after its final norm
    target_logits: Callable[[Tensor], Tensor]
    """(R, D) -> (R, V) float32."""
    weights: Tensor  # (K,) float32, the weight of each row; with `pace`, what its weight is multiplied by
    terms: Sequence[tuple[float, str]]
    """Factor and name of each divergence: one of `heads.losses.LOSSES`, or `labels`, cross-entropy of the labels."""
    pace: bool = False
    """True if a row is weighted by D-PACE."""
    confidence_weight: float = 0.0
    """Factor of the confidence's cross-entropy."""

    @property
    def reads_target(self) -> bool:
        """True if the target's distribution is asked for."""
        return self.confidence_weight > 0 or any(name != LABELS for _, name in self.terms)


@dataclass(frozen=True, eq=False)
class BlockLoss:
    """Result of `block_loss`; all but `loss` are detached."""

    loss: Tensor  # (), weighted sum, which carries the gradient
    sums: Tensor  # (K,) unweighted
    weight: Tensor  # () sum of the rows' weights
    correct: Tensor  # (M, K) bool: the likeliest tokens agree; with `labels` alone, the draft's is the label
    overlap: Tensor  # (M, K) sum of min(p, q); with `labels` alone, q of the label


def dpace(probs: Tensor, valid: Tensor) -> Tensor:
    """D-PACE's weights (M, K) of rows whose labels have the draft's probabilities `probs` (M, K): row k counts as much
    as the blocks that reach row k or a later one."""
    reached = (PACE + (1 - PACE) * probs).cumprod(1) * valid
    return reached.flip(1).cumsum(1).flip(1) * valid


def block_loss(
    states: Tensor,
    lm_head_weight: Tensor,
    task: BlockTask,
    *,
    bias_states: Tensor | None = None,
    bias_weight: Tensor | None = None,
    confidence: Tensor | None = None,
    chunk: int | None = None,
) -> BlockLoss:
    """The loss of states (M, K, D), read by the frozen output head (V, D).

    bias_states (M, K, r) times bias_weight (V, r) is added to the logits; confidence (M, K): logits of the share of p
    and q that overlaps. `chunk` sets the blocks handled at once.
    """
    found = _BlockLoss.apply(states, bias_states, bias_weight, confidence, lm_head_weight, task, chunk)  # type: ignore[no-untyped-call]
    return BlockLoss(*found)


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        bias_states: Tensor | None,
        bias_weight: Tensor | None,
        confidence: Tensor | None,
        lm_head_weight: Tensor,
        task: BlockTask,
        chunk: int | None,
    ) -> tuple[Tensor, ...]:
        M, K, _ = states.shape
        V = len(lm_head_weight)
        wide = torch.promote_types(states.dtype, torch.float32)
        matrix = lm_head_weight.to(states.dtype)
        bias = None if bias_weight is None else bias_weight.to(states.dtype)
        grad_states = torch.empty_like(states)
        grad_bias_states = None if bias_states is None else torch.empty_like(bias_states)
        grad_bias = None if bias_weight is None else bias_weight.new_zeros(bias_weight.T.shape, dtype=wide).T
        grad_confidence = None if confidence is None else torch.empty_like(confidence)
        total, weight, sums = (
            states.new_zeros((), dtype=wide),
            states.new_zeros((), dtype=wide),
            states.new_zeros(K, dtype=wide),
        )
        correct = torch.zeros(M, K, dtype=torch.bool, device=states.device)
        overlap = torch.zeros(M, K, dtype=wide, device=states.device)
        C = chunk or max(1, max(LEAST_ROWS, CHUNK_BYTES[states.device.type] // (4 * V)) // K)
        with torch.autocast(states.device.type, enabled=False):
            for start in range(0, M, C):
                part = slice(start, start + C)
                rows, labels, valid = states[part].flatten(0, 1), task.labels[part].flatten(), task.valid[part]
                z = matmul(rows, matrix.T)
                if bias_states is not None and bias is not None:
                    beside = bias_states[part].flatten(0, 1).to(rows.dtype)
                    z = z + matmul(beside, bias.T)
                q = Distribution(z.to(wide))  # (C * K, V)
                of_label = q.probs.gather(1, labels[:, None])[:, 0]
                if task.reads_target:
                    p = Distribution(task.target_logits(task.hidden[task.teacher[part].flatten()]).to(wide))
                    best, shared = p.best, torch.minimum(p.probs, q.probs).sum(-1)
                else:
                    best, shared = labels, of_label
                value, grad = torch.zeros_like(of_label), torch.zeros((), dtype=wide, device=z.device)
                for factor, name in task.terms:
                    made, slope = _of_labels(q, labels) if name == LABELS else LOSSES[name](q, p)
                    value, grad = value + factor * made, grad + slope.mul_(factor)
                by_row = valid * task.weights  # (C, K)
                if task.pace:
                    by_row = by_row * dpace(of_label.view_as(valid), valid)
                if confidence is not None and grad_confidence is not None:
                    sure = confidence[part].to(wide)
                    value = value + task.confidence_weight * binary_cross_entropy_with_logits(
                        sure.flatten(), shared, reduction="none"
                    )
                    error = sure.sigmoid() - shared.view_as(sure)
                    grad_confidence[part] = (task.confidence_weight * by_row * error).to(confidence.dtype)
                own = by_row.flatten().to(rows.dtype)[:, None]  # scales what is D wide, not V
                grad = grad.to(rows.dtype)
                grad_states[part] = matmul(grad, matrix).mul_(own).view_as(states[part])
                if bias is not None and grad_bias_states is not None and grad_bias is not None:
                    grad_bias_states[part] = matmul(grad, bias).mul_(own).view_as(grad_bias_states[part])
                    grad_bias += matmul((beside * own).T, grad).T
                value = value.view_as(valid)
                total += vecdot(value.flatten(), by_row.flatten().to(wide))
                weight += by_row.sum()
                sums += (value * valid).sum(0)
                correct[part] = (q.best == best).view_as(valid) & valid
                overlap[part] = shared.view_as(valid) * valid
        ctx.save_for_backward(grad_states, grad_bias_states, grad_bias, grad_confidence)
        ctx.mark_non_differentiable(sums, weight, correct, overlap)
        return total, sums, weight, correct, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if saved is None else saved * grads[0] for saved in ctx.saved_tensors), None, None, None


def _of_labels(q: Distribution, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of labels (R,), and its gradient in the logits."""
    grad = q.probs.clone()
    grad.scatter_add_(1, labels[:, None], grad.new_full((len(labels), 1), -1.0))
    return q.lse - q.logits.gather(1, labels[:, None])[:, 0], grad
