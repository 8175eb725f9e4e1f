"""Loss of draft blocks, in chunks of whole blocks.

As in `heads.methods.losses`, no float32 tensor of (all rows) x (vocabulary) ever exists, and the gradient is computed
while the logits of a chunk exist. A chunk holds whole blocks, because a row's weight may depend on the draft's
probabilities in its whole block.

Letters: M blocks, C blocks of a chunk (C rows in private classes), K depth, D hidden, V vocabulary, r rank of the bias,
P tokens of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import vecdot
from torch.nn.functional import binary_cross_entropy_with_logits

from heads.methods.labels import LABELS
from heads.methods.losses import CHUNK_BYTES, LOSSES, MIN_ROWS, Distribution, matmul

PACE = 0.5
"""Share of the constant 1 in D-PACE's mixture with the probability of each label (arXiv 2605.18810, alpha)."""


@dataclass(frozen=True, eq=False)
class BlockTask:
    """Labels of some blocks, and the loss to compute for them."""

    labels: Tensor  # (M, K) int64, token ids
    valid: Tensor  # (M, K) bool, True from the first row up to some last one
    teacher: Tensor  # (M, K) int64, row of `hidden` that predicts the label
    hidden: Tensor  # (P, D), the target's states after its final norm
    target_logits: Callable[[Tensor], Tensor]
    """Target's output head: (R, D) -> (R, V) float32."""
    weights: Tensor  # (K,) float32, weight of each row; with `pace`, a factor of its weight
    terms: Sequence[tuple[float, str]]
    """Factor and name of each divergence, one of `losses.LOSSES` or `labels`, the cross-entropy of the labels."""
    pace: bool = False
    """True if rows are weighted by D-PACE."""
    confidence_weight: float = 0.0
    """Factor of the confidence's cross-entropy."""
    rounds: Sequence[float] = ()
    """Factor of the divergences in each further round."""
    likeliest: int = 0
    """Number of likeliest tokens of each row to return, for a loss of the caller's own."""

    @property
    def reads_target(self) -> bool:
        return self.confidence_weight > 0 or self.likeliest > 0 or any(name != LABELS for _, name in self.terms)


@dataclass(frozen=True)
class Candidates:
    """A draft's choice among the likeliest tokens of each row."""

    count: int
    weight: float
    """Factor of the choice's cross-entropy."""


@dataclass(frozen=True, eq=False)
class Likeliest:
    """The k likeliest tokens of each row by the logits of the output head, best first. Only `logs` carries a
    gradient."""

    logs: Tensor  # (M, K, k) log q
    tokens: Tensor  # (M, K, k) int64
    target: Tensor  # (M, K, k) log p
    of_label: Tensor  # (M, K) log p of the label
    best: Tensor  # (M, K) int64, the target's likeliest token
    weights: Tensor  # (M, K), of the rows


@dataclass(frozen=True, eq=False)
class BlockLoss:
    """Result of `block_loss`. Everything except `loss` and `likeliest.logs` is detached."""

    loss: Tensor  # (), weighted sum, which carries the gradient
    sums: Tensor  # (K,) unweighted
    weight: Tensor  # () sum of the rows' weights
    correct: Tensor  # (M, K) bool: the likeliest tokens agree; with only `labels`, the draft's is the label
    overlap: Tensor  # (M, K) sum of min(p, q); with only `labels`, q of the label
    likeliest: Likeliest | None = None


class _All:
    """Distribution of a draft over all tokens, for C rows."""

    def __init__(self, q: Distribution) -> None:
        self.q, self.best = q, q.best

    def of(self, labels: Tensor) -> Tensor:
        """Return q (C,) of labels (C,)."""
        return self.q.probs.gather(1, labels[:, None])[:, 0]

    def overlap(self, p: Distribution) -> Tensor:
        return torch.minimum(p.probs, self.q.probs).sum(-1)

    def through_bias(self, grad: Tensor, bias: Tensor, beside: Tensor, into: Tensor) -> Tensor:
        """Return the gradient (C, r) of the factors of the bias (V, r), from the gradient of the logits, grad (C, V).
        Add the gradient of the bias, for rows with factors `beside` (C, r), to `into` (V, r)."""
        into += matmul(beside.T, grad).T
        return matmul(grad, bias)


class _Chosen:
    """Choice of a draft among the `candidates.count` likeliest tokens of C rows by the logits of q (C, V). The previous
    token adds beside (C, r) times bias (V, r) to their logits. The cross-entropy is with the target's distribution p,
    or with labels (C,) if p is None."""

    def __init__(
        self,
        q: Distribution,
        candidates: Candidates,
        beside: Tensor,
        bias: Tensor,
        p: Distribution | None,
        labels: Tensor,
    ) -> None:
        values, self.tokens = q.logits.topk(candidates.count, 1)  # (C, k)
        added = torch.einsum("cr,ckr->ck", beside, bias[self.tokens])
        logs = (values + added.to(values.dtype)).log_softmax(1)
        truth = (self.tokens == labels[:, None]).to(logs.dtype) if p is None else p.probs.gather(1, self.tokens)
        self.probs = logs.exp()
        self.best = self.tokens.gather(1, logs.argmax(1, keepdim=True))[:, 0]
        self.value = -candidates.weight * (truth * logs).sum(1)  # (C,)
        self.grad = candidates.weight * (self.probs * truth.sum(1, keepdim=True) - truth)  # (C, k), in candidate logits

    def of(self, labels: Tensor) -> Tensor:
        """Return q (C,) of labels (C,), 0 for labels that are not candidates."""
        return (self.probs * (self.tokens == labels[:, None])).sum(1)

    def overlap(self, p: Distribution) -> Tensor:
        return torch.minimum(p.probs.gather(1, self.tokens), self.probs).sum(1)

    def through_bias(self, grad: Tensor, bias: Tensor, beside: Tensor, into: Tensor) -> Tensor:
        slope = self.grad.to(beside.dtype)
        by_candidate = slope[..., None] * beside[:, None]  # (C, k, r)
        into.index_add_(0, self.tokens.flatten(), by_candidate.flatten(0, 1).to(into.dtype))
        return torch.einsum("ck,ckr->cr", slope, bias[self.tokens])


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
    states: Tensor,
    lm_head_weight: Tensor,
    task: BlockTask,
    *,
    bias_states: Tensor | None = None,
    bias_weight: Tensor | None = None,
    candidates: Candidates | None = None,
    confidence: Tensor | None = None,
    rounds: Tensor | None = None,
) -> BlockLoss:
    """Return the loss of states (M, K, D), whose logits come from the frozen output head (V, D).

    bias_states (M, K, r) times bias_weight (V, r) is added to the logits. With `candidates`, it is added only to
    theirs, and the draft is the choice among them. confidence (M, K): logits of the overlap of p and q. rounds
    (P, M, K, r): like bias_states, for distributions that the loss has beside the draft's.
    """
    given = states, bias_states, bias_weight, confidence, rounds
    found = _BlockLoss.apply(*given, lm_head_weight, task, candidates)  # type: ignore[no-untyped-call]
    return replace(BlockLoss(*found[:5]), likeliest=Likeliest(*found[5:]) if task.likeliest else None)


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        bias_states: Tensor | None,
        bias_weight: Tensor | None,
        confidence: Tensor | None,
        rounds: Tensor | None,
        lm_head_weight: Tensor,
        task: BlockTask,
        candidates: Candidates | None,
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
        grad_rounds = None if rounds is None else torch.empty_like(rounds)
        total, weight, sums = (
            states.new_zeros((), dtype=wide),
            states.new_zeros((), dtype=wide),
            states.new_zeros(K, dtype=wide),
        )
        correct = torch.zeros(M, K, dtype=torch.bool, device=states.device)
        overlap = torch.zeros(M, K, dtype=wide, device=states.device)
        likeliest, expected = [], []
        with torch.autocast(states.device.type, enabled=False):
            for part in chunks_of(M, K, V, states.device):
                rows, labels, valid = states[part].flatten(0, 1), task.labels[part].flatten(), task.valid[part]
                base = z = matmul(rows, matrix.T)
                if bias_states is not None and bias is not None:
                    beside = bias_states[part].flatten(0, 1).to(rows.dtype)
                    z = z if candidates else z + matmul(beside, bias.T)
                q = Distribution(z.to(wide))  # (C * K, V)
                p = None
                if task.reads_target:
                    p = Distribution(task.target_logits(task.hidden[task.teacher[part].flatten()]).to(wide))
                chosen = None
                if candidates is not None and bias is not None:
                    chosen = _Chosen(q, candidates, beside, bias, p, labels)
                drafts = chosen or _All(q)
                of_label, best = drafts.of(labels), labels if p is None else p.best
                shared = of_label if p is None else drafts.overlap(p)
                value, grad = _divergences(task.terms, q, p, labels)
                if chosen is not None:
                    value, grad = value + chosen.value, grad.scatter_add_(1, chosen.tokens, chosen.grad)
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
                own = by_row.flatten().to(rows.dtype)[:, None]  # scales tensors of width D, not V
                grad = grad.to(rows.dtype)
                if task.likeliest and p is not None:
                    tokens = q.logits.topk(task.likeliest, 1).indices
                    logs = q.logs.gather(1, tokens)
                    target = p.logs.gather(1, torch.cat([tokens, labels[:, None]], 1))
                    found = logs, tokens, target[:, :-1], target[:, -1], p.best, by_row
                    likeliest.append([x.reshape(*valid.shape, *x.shape[1:]) for x in found[:-1]] + [by_row])
                    expected.append(matmul(q.probs.to(rows.dtype), matrix).view_as(states[part]))
                if bias is not None and grad_bias_states is not None and grad_bias is not None:
                    into_beside = drafts.through_bias(grad, bias, beside * own, grad_bias)
                    grad_bias_states[part] = into_beside.mul_(own).view_as(grad_bias_states[part])
                for i, factor in enumerate(task.rounds):
                    assert rounds is not None and grad_rounds is not None and bias is not None
                    beside = rounds[i, part].flatten(0, 1).to(rows.dtype)
                    q_round = Distribution((base + matmul(beside, bias.T)).to(wide))
                    made, slope = _divergences([(factor * f, name) for f, name in task.terms], q_round, p, labels)
                    value, slope = value + made, slope.to(rows.dtype)
                    assert grad_bias is not None
                    into_beside = drafts.through_bias(slope, bias, beside * own, grad_bias)
                    grad_rounds[i, part] = into_beside.mul_(own).view_as(grad_rounds[i, part])
                    grad = grad + slope
                grad_states[part] = matmul(grad, matrix).mul_(own).view_as(states[part])
                value = value.view_as(valid)
                total += vecdot(value.flatten(), by_row.flatten().to(wide))
                weight += by_row.sum()
                sums += (value * valid).sum(0)
                correct[part] = (drafts.best == best).view_as(valid) & valid
                overlap[part] = shared.view_as(valid) * valid
        best_tokens = [torch.cat(parts) for parts in zip(*likeliest, strict=True)]
        ctx.beside = (best_tokens[1], torch.cat(expected), matrix) if best_tokens else None
        ctx.save_for_backward(grad_states, grad_bias_states, grad_bias, grad_confidence, grad_rounds)
        ctx.mark_non_differentiable(sums, weight, correct, overlap, *best_tokens[1:])
        return total, sums, weight, correct, overlap, *best_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        into_states, *into = (None if saved is None else saved * grads[0] for saved in ctx.saved_tensors)
        if ctx.beside is not None and into_states is not None:
            # The gradient of log q of a token is its row of the output head minus the mean of all rows under q.
            (tokens, expected, matrix), by_log = ctx.beside, grads[5].to(into_states.dtype)
            into_states -= by_log.sum(-1, keepdim=True) * expected
            for k in range(tokens.shape[2]):
                into_states += by_log[..., k, None] * matrix[tokens[..., k]]
        return into_states, *into, *(None,) * 3


def _divergences(
    terms: Sequence[tuple[float, str]], q: Distribution, p: Distribution | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the divergences of rows (R,), and its gradient with respect to the logits of q."""
    value, grad = q.logits.new_zeros(len(labels)), q.logits.new_zeros(())
    for factor, name in terms:
        if p is None or name == LABELS:
            made, slope = _of_labels(q, labels)
        else:
            logits = q.logits.detach().requires_grad_()
            with torch.enable_grad():
                made = LOSSES[name](Distribution(logits), p)
                (slope,) = torch.autograd.grad(made.sum(), logits)
            made = made.detach()
        value, grad = value + factor * made, grad + slope.mul_(factor)
    return value, grad


def _of_labels(q: Distribution, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of labels (R,), and its gradient with respect to the logits."""
    grad = q.probs.clone()
    grad.scatter_add_(1, labels[:, None], grad.new_full((len(labels), 1), -1.0))
    return -q.logs.gather(1, labels[:, None])[:, 0], grad
