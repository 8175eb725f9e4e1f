"""Loss of draft blocks, in chunks of whole blocks.

As in `heads.parts.losses`, no float32 tensor of (all rows) x (vocabulary) ever exists, and the gradient is computed
while the logits of a chunk exist. A chunk holds whole blocks, because a row's weight may depend on the draft's
probabilities in its whole block.

Letters: M blocks, C blocks of a chunk, R rows of a block, K depth, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from heads.core.contract import Batch, HeadLoss
from heads.parts.losses import CHUNK_BYTES, LOSSES, MIN_ROWS, DifferentiatedLoss, Distribution, matmul
from heads.parts.part_settings import LABELS

PACE = 0.5
"""Share of the constant 1 in D-PACE's mixture with the probability of each label (arXiv 2605.18810, alpha)."""


@dataclass(frozen=True, eq=False)
class BlockStates:
    """M blocks after the head's layers, in training and in drafting."""

    states: Tensor  # (M, R, D), after the final norm; row 0 is the root's
    roots: Tensor  # (M,) int64, token ids
    newest: Tensor  # (M, D), the context of the position before the root
    embed_tokens: Callable[[Tensor], Tensor]
    """The target's input embeddings."""
    drafting: slice
    """Which rows draft."""

    @property
    def rows(self) -> Tensor:
        """States (M, K, D) of the rows that draft."""
        return self.states[:, self.drafting]

    def part(self, blocks: slice) -> "BlockStates":
        return replace(self, states=self.states[blocks], roots=self.roots[blocks], newest=self.newest[blocks])


@dataclass(frozen=True, eq=False)
class BlockTask:
    """Labels of M blocks, and how their loss is weighted."""

    batch: Batch
    slots: Tensor  # (M, K) int64, index of each label among all tokens of the batch
    valid: Tensor  # (M, K) bool, True from the first row up to some last one
    weights: Tensor  # (K,) float32, weight of each row; with `pace`, a factor of its weight
    pace: bool
    """True if rows are weighted by D-PACE."""
    reads_target: bool
    """True if the loss compares with the target's distribution."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels of a chunk of C blocks."""

    tokens: Tensor  # (C, K) int64
    previous: Tensor  # (C, K) int64, the true token before each
    valid: Tensor  # (C, K) bool
    target: Distribution | None
    """The target's distributions (C * K, V), if the loss compares with them."""
    progress: float
    """`Rows.progress`"""


@dataclass(frozen=True, eq=False)
class RowLosses:
    """Losses of a chunk's rows. Only `values` carries a gradient."""

    values: Tensor  # (C, K)
    probs: Tensor  # (C, K), the draft's probability of each label
    best: Tensor  # (C, K) int64, the draft's likeliest token; -1 for a row that cannot be right


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return matmul(grad, weight), matmul(x.T, grad).T if ctx.needs_input_grad[1] else None


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (..., D) times an output matrix (V, D), in the dtype of x, by `matmul`: (..., V)."""
    rows: Tensor = _Product.apply(x.flatten(0, -2), weight.to(x.dtype))  # type: ignore[no-untyped-call]
    return rows.view(*x.shape[:-1], -1)


def draft_distribution(logits: Tensor) -> Distribution:
    """Return the distributions (C * K, V) of a chunk's logits (C, K, V)."""
    return Distribution(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)))


def row_losses(q: Distribution, terms: Sequence[tuple[float, str]], labels: Labels) -> RowLosses:
    """Return the weighted sum of divergences of the draft's distributions q (C * K, V). terms: the factor and name of
    each, one of `losses.LOSSES` or `labels`, the cross-entropy of the labels."""
    p = labels.target
    tokens = labels.tokens.flatten()[:, None]
    with torch.autocast(tokens.device.type, enabled=False):
        of_label = q.logs.gather(1, tokens)[:, 0]
        values = torch.zeros_like(of_label)
        for factor, name in terms:
            values = values + factor * (-of_label if p is None or name == LABELS else LOSSES[name](q, p))
    shape = labels.tokens.shape
    return RowLosses(values.view(shape), of_label.detach().exp().view(shape), q.best.view(shape))


def among(tokens: Tensor, scores: Tensor, vocab: int) -> Tensor:
    """Return logits (..., V) that are `scores` (..., k) for the candidates `tokens` (..., k), and -inf for others."""
    logits = scores.new_full((*scores.shape[:-1], vocab), -torch.inf)
    return logits.scatter_(-1, tokens.expand_as(scores), scores)


def chunks_of(blocks: int, depth: int, vocab: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of as many blocks as have float32 logits of `CHUNK_BYTES`."""
    step = max(1, max(MIN_ROWS, CHUNK_BYTES[device.type] // (4 * vocab)) // depth)
    return (slice(start, start + step) for start in range(0, blocks, step))


def dpace(probs: Tensor, valid: Tensor) -> Tensor:
    """Return D-PACE's weights (M, K) of rows whose labels have the draft's probabilities `probs` (M, K). A row's weight
    is the sum of the mixed probabilities that a block is right up to that row, and up to each later one."""
    reached = (PACE + (1 - PACE) * probs).cumprod(1) * valid
    return reached.flip(1).cumsum(1).flip(1) * valid


def block_loss(
    losses_of: Callable[[Tensor, BlockStates, Labels], RowLosses],
    block: BlockStates,
    task: BlockTask,
    parameters: Callable[[], Sequence[Tensor]],
) -> HeadLoss:
    """Return the loss of blocks, whose K drafting rows predict the labels.

    losses_of: (logits (C, K, V) of these rows by the frozen output head (V, D), their blocks, their labels) -> losses.
    parameters: returns the trained weights that it reads.
    """
    assert task.batch.shared.lm_head_weight is not None
    matrix = task.batch.shared.lm_head_weight.to(block.states.dtype)
    tokens = task.batch.tokens.flatten()
    hidden = task.batch.hidden.flatten(0, 1)
    (M, K), V = task.slots.shape, len(matrix)
    device = block.states.device
    dtype = torch.promote_types(block.states.dtype, torch.float32)
    sums, correct = torch.zeros(2, K, dtype=dtype, device=device)
    loss, weight = torch.zeros(2, dtype=dtype, device=device)
    inputs = [block.states, block.newest]
    by_chunk: list[list[Tensor]] = []  # gradients of the inputs
    of_parameters: list[Tensor] = []  # sums of the gradients of chunks; the weights' own shapes are not read (ZeRO-3)

    def add_chunk(part: slice) -> None:
        leaves = [tensor[part].detach().requires_grad_() for tensor in inputs]
        some = replace(block.part(part), states=leaves[0], newest=leaves[1])
        slots = task.slots[part]
        p = None
        if task.reads_target:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                p = Distribution(task.batch.shared.lm_head(hidden[slots.flatten() - 1]).to(dtype))
        labels = Labels(tokens[slots], tokens[slots - 1], task.valid[part], p, task.batch.progress)
        with torch.enable_grad():
            rows = losses_of(product(some.rows, matrix), some, labels)
            weights = labels.valid * task.weights  # (C, K)
            if task.pace:
                weights = weights * dpace(rows.probs, labels.valid)
            value = (rows.values * weights).sum()
            grads = torch.autograd.grad(value, [*leaves, *parameters()], materialize_grads=True)
        by_chunk.append([*grads[: len(inputs)]])
        for i, grad in enumerate(grads[len(inputs) :]):
            if i == len(of_parameters):
                of_parameters.append(torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32)))
            of_parameters[i] += grad
        best = labels.tokens if p is None else p.best.view_as(labels.tokens)
        loss.add_(value.detach())
        weight.add_(weights.sum())
        sums.add_((rows.values.detach() * labels.valid).sum(0))
        correct.add_(((rows.best == best) & labels.valid).sum(0))

    for part in chunks_of(M, K, V, device):
        add_chunk(part)
    of_inputs = [torch.cat(grads) for grads in zip(*by_chunk, strict=True)]
    gradients = [*of_inputs, *of_parameters]
    total: Tensor = DifferentiatedLoss.apply(loss, gradients, *inputs, *parameters())  # type: ignore[no-untyped-call]
    return HeadLoss(total, sums, correct, weight if task.pace else None)
