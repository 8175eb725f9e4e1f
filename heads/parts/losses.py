"""Losses of a draft distribution q against the target's distribution p, computed in chunks of rows.

No float32 tensor of (all rows) x (vocabulary) ever exists. Each chunk computes the target's logits once and the draft's
logits depth by depth, and computes the gradient while they exist (the recomputation-free form of a fused linear
cross-entropy). Only the gradients of the draft's states and of its output weights are kept.

Letters: R supervised labels, C rows of a chunk, K depths, D hidden, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import vecdot

from heads.core.contract import HeadLoss
from heads.parts.part_settings import LABELS

CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**28}
"""Size of one float32 (C, V) tensor. A few of them exist at a time."""
MIN_ROWS = 256
"""Minimum number of rows of a chunk, for any vocabulary. Products of few rows take longer per row."""
SPAN = 128
"""Number of neighbouring logits in which `likeliest` looks for the position of the maximum."""


class Distribution:
    """Distributions of C rows over a vocabulary, the softmax of their logits. Each value is computed on first use."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits  # (C, V), at least float32

    @cached_property
    def logs(self) -> Tensor:
        """Log-probabilities (C, V)."""
        return self.logits.log_softmax(-1)

    @cached_property
    def probs(self) -> Tensor:
        """(C, V)."""
        return self.logits.softmax(-1)

    @cached_property
    def best(self) -> Tensor:
        """(C,) int64, the likeliest token, the lowest on ties."""
        return likeliest(self.logits.detach())

    @cached_property
    def negative_entropy(self) -> Tensor:
        """Sum of p log p (C,)."""
        total: Tensor = vecdot(self.probs, self.logs)
        return total

    def of_rows(self, rows: Tensor) -> "Distribution":
        """Return the distributions of some rows (R,), with all that was computed of them."""
        some = Distribution(self.logits)
        vars(some).update((name, value[rows]) for name, value in vars(self).items())
        return some


def likeliest(logits: Tensor) -> Tensor:
    """Return the argmax of each row (C, n), the lowest on ties.

    It works in two stages, because a CPU vectorises the search for a maximum, but not for its position."""
    if logits.shape[-1] % SPAN:
        return logits.argmax(-1)
    spans = logits.unflatten(-1, (-1, SPAN))  # (C, n / SPAN, SPAN)
    span = spans.amax(-1).argmax(-1, keepdim=True)  # (C, 1)
    inside = spans.gather(1, span[..., None].expand(-1, 1, SPAN))[:, 0].argmax(-1)
    best: Tensor = span[:, 0] * SPAN + inside
    return best


Divergence = Callable[[Distribution, Distribution], Tensor]
"""(draft's q, target's p) -> divergence of each row (C,), differentiable in the logits of q."""


class _SoftCrossEntropy(torch.autograd.Function):
    """-sum p log q (C,) of the logits of q (C, V), of its likeliest tokens (C,) and of p (C, V).

    Its gradient, q - p, takes one pass over (C, V). Autograd takes several, with a second exponential.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, best: Tensor, p: Tensor) -> Tensor:
        q = logits.softmax(-1)
        ctx.save_for_backward(q, p)
        # The log-sum-exp comes from the likeliest token, whose probability is at least 1 / V.
        most, prob = (x.gather(1, best[:, None])[:, 0] for x in (logits, q))
        value: Tensor = most - prob.log() - vecdot(p, logits)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        q, p = ctx.saved_tensors
        return q.sub_(p).mul_(grad[:, None]), None, None  # in place: each chunk is differentiated once


def kl(q: Distribution, p: Distribution) -> Tensor:
    """KL(p || q), EAGLE-3's soft cross-entropy (arXiv 2503.01840) minus the entropy of p, which has no gradient."""
    cross_entropy: Tensor = _SoftCrossEntropy.apply(q.logits, q.best, p.probs)  # type: ignore[no-untyped-call]
    return cross_entropy + p.negative_entropy


def cross_entropy(q: Distribution, p: Distribution) -> Tensor:
    """-log q of the target's likeliest token."""
    return -q.logs.gather(-1, p.best[:, None])[:, 0]


def reverse_kl(q: Distribution, p: Distribution) -> Tensor:
    """KL(q || p), with p bounded away from zero, where the divergence would be infinite."""
    value: Tensor = vecdot(q.probs, q.logs - p.logs.clamp_min(-23.0))
    return value


def total_variation(q: Distribution, p: Distribution) -> Tensor:
    """1 - sum min(p, q), the rate of rejection in rejection sampling (Leviathan et al., arXiv 2211.17192, cor. 3.6)."""
    return (q.probs - p.probs).relu().sum(-1)


def negative_log_acceptance(q: Distribution, p: Distribution) -> Tensor:
    """-log sum min(p, q): the same optimum as total variation, without its vanishing gradient (arXiv 2602.23881)."""
    acceptance = 1 - total_variation(q, p)
    below = (1e-5 - acceptance.detach()).relu()  # added as a constant: the gradient passes where there is no overlap
    return -(acceptance + below).log()


def jsd(q: Distribution, p: Distribution) -> Tensor:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, the Jensen-Shannon divergence (Agarwal et al., arXiv
    2306.13649, section 2, with beta 0.5)."""
    m = ((p.probs + q.probs) / 2).clamp_min(1e-30)
    # The entropy of m minus the mean entropy of p and q.
    value: Tensor = (p.negative_entropy + vecdot(q.probs, q.logs)) / 2 - vecdot(m, m.log())
    return value


def kl_tv(q: Distribution, p: Distribution) -> Tensor:
    """w KL(p || q) + (1 - w) TV(p, q), with w = exp(-3 acceptance) held constant. KL dominates while the distributions
    overlap little, and total variation once they overlap much (arXiv 2602.23881)."""
    distance = total_variation(q, p)
    w = (-3 * (1 - distance.detach())).exp()
    return w * kl(q, p) + (1 - w) * distance


LOSSES: dict[str, Divergence] = {
    "kl": kl,
    "cross_entropy": cross_entropy,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "jsd": jsd,
    "kl_tv": kl_tv,
}


def draft_loss(
    states: Tensor | Sequence[Tensor],
    weight: Tensor | Sequence[Tensor],
    valid: Tensor,
    hidden: Tensor,
    target_logits: Callable[[Tensor], Tensor],
    draft_to_target: Tensor,
    scale: Tensor,
    *,
    loss: str = "kl",
    soft_cap: float | None = None,
) -> HeadLoss:
    """Return the draft's divergence from the target at R supervised labels and K depths.

    states: for each depth the draft's normed states, (R, D) of all rows or of the valid ones alone; weight (Vd, D): its
    output head, or K of them, one for each depth; valid (K, R) bool: rows that exist at that depth; hidden (R, D'): the
    target's post-norm states that predict the labels; target_logits: (C, D') -> (C, V) float32; draft_to_target (Vd,)
    int64: the target ids of the draft vocabulary; scale (K,): the factor of each depth's sum.

    p is renormalised over the draft vocabulary. As in EAGLE-3, the loss leaves out rows whose likeliest token is
    outside it, because the draft cannot be right there. `loss`: the name of a divergence; `labels` is the
    cross-entropy. `soft_cap`: the draft's logits z are soft_cap * tanh(z / soft_cap).
    """
    divergence = LOSSES["cross_entropy" if loss == LABELS else loss]
    weights = (weight,) if isinstance(weight, Tensor) else weight
    states = [*states]
    K, R = valid.shape
    device, own_dtype = states[0].device, states[0].dtype
    dtype = torch.promote_types(own_dtype, torch.float32)
    sums, correct = torch.zeros(2, K, dtype=dtype, device=device)
    matrices = [weight.detach().to(own_dtype) for weight in weights]
    grad_states = [torch.empty_like(state) for state in states]
    # The frozen target's own output head needs no gradient, so none is computed.
    grad_weights = [
        weight.new_zeros(weight.T.shape, dtype=dtype).T if weight.requires_grad else None for weight in weights
    ]

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        V = target_logits(hidden[:1]).shape[-1]
        in_vocabulary = draft_to_target.new_zeros(V, dtype=torch.bool)
        in_vocabulary[draft_to_target] = True
        C = max(MIN_ROWS, CHUNK_BYTES[device.type] // (4 * V))
        chosen = [None if len(state) == R else _chunked(rows, C) for state, rows in zip(states, valid, strict=True)]
        for chunk, start in enumerate(range(0, R, C)):
            part = slice(start, start + C)
            logits = target_logits(hidden[part]).to(dtype)
            can_be_right = in_vocabulary[likeliest(logits)]
            whole = Distribution(logits if len(draft_to_target) == V else logits.index_select(1, draft_to_target))
            for k in range(K):
                own, p, counted = part, whole, valid[k, part] & can_be_right
                if (mine := chosen[k]) is not None:
                    own, rows = mine[chunk]
                    p, counted = whole.of_rows(rows), can_be_right[rows]
                state = states[k][own]
                matrix = matrices[k % len(weights)]
                grad_weight = grad_weights[k % len(weights)]
                z = matmul(state, matrix.T).to(dtype)  # (C, Vd)
                with torch.enable_grad():
                    z.requires_grad_()
                    q = Distribution(z if soft_cap is None else soft_cap * torch.tanh(z / soft_cap))
                    value = divergence(q, p)
                    (grad,) = torch.autograd.grad(value.sum(), z)
                grad = grad.to(own_dtype)
                factor = (counted * scale[k]).to(own_dtype)[:, None]  # scales tensors of width D, not Vd
                grad_states[k][own] = matmul(grad, matrix) * factor
                if grad_weight is not None:
                    grad_weight += matmul((state * factor).T, grad).T
                sums[k] += vecdot(value.detach(), counted.to(dtype))
                correct[k] += ((q.best == p.best) & counted).sum()
                del z, q, value, grad  # before the next tensors of their size are made
    gradients = [*grad_states, *grad_weights]
    total = DifferentiatedLoss.apply((sums * scale).sum(), gradients, *states, *weights)  # type: ignore[no-untyped-call]
    return HeadLoss(total, sums, correct)


def _chunked(valid: Tensor, C: int) -> list[tuple[slice, Tensor]]:
    """Return for each chunk of C rows which of the valid rows (R,) it holds, and their places in the chunk."""
    rows = valid.nonzero()[:, 0]
    starts = torch.arange(0, len(valid), C, device=valid.device)
    bounds = [*torch.searchsorted(rows, starts).tolist(), len(rows)]
    ends = enumerate(pairwise(bounds))
    return [(slice(begin, end), rows[begin:end] - C * chunk) for chunk, (begin, end) in ends]


class DifferentiatedLoss(torch.autograd.Function):
    """A loss () whose gradients, one for each of the `inputs` or None, are already known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor) -> Tensor:
        known = zip(gradients, inputs, strict=True)
        ctx.save_for_backward(*(None if grad is None else grad.to(of.dtype) for grad, of in known))
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if known is None else known * grad for known in ctx.saved_tensors)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product (m, k) @ (k, n) -> (m, n).

    Float32 on a CPU uses oneDNN, through the operator that torch's own compiler calls. `@` uses MKL, which does not use
    AVX-512 on processors other than Intel's. oneDNN has no products without rows or inputs.
    """
    if a.device.type == "cpu" and a.dtype == torch.float32 and a.numel() and torch.backends.mkldnn.is_available():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
        return product
    return a @ b
