"""Losses of a draft distribution q against the target's distribution p, computed in chunks of rows.

No float32 tensor of (all rows) x (vocabulary) ever exists. Each chunk computes the target's logits once and the draft's
logits depth by depth, and computes the gradient while they exist (the recomputation-free form of a fused linear
cross-entropy). Only the gradients of the draft's states and of its output weights are kept.

Letters: R supervised labels, C rows of a chunk, K depths, D hidden, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import vecdot

CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**28}
"""Size of one float32 (C, V) tensor. A few of them exist at a time."""
LEAST_ROWS = 256
"""Minimum number of rows of a chunk, for any vocabulary. Products of few rows take longer per row."""
SPAN = 128
"""Number of neighbouring logits in which `likeliest` looks for the position of the maximum."""


class Distribution:
    """Distributions of C rows over the draft vocabulary, the softmax of their logits. Values that only some losses need
    are computed on first use."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits  # (C, Vd), at least float32
        self.probs = logits.softmax(-1)
        self.best = likeliest(logits)  # (C,) int64, the lowest on ties
        # The log-sum-exp comes from the likeliest token, whose probability is at least 1 / Vd. That takes a tenth of
        # the time.
        most, prob = (x.gather(1, self.best[:, None])[:, 0] for x in (logits, self.probs))
        self.lse = most - prob.log_()  # (C,)

    @cached_property
    def logs(self) -> Tensor:
        """Log-probabilities (C, Vd)."""
        return self.logits - self.lse[:, None]

    @cached_property
    def negative_entropy(self) -> Tensor:
        """Sum of p log p (C,)."""
        total: Tensor = vecdot(self.probs, self.logits)
        return total - self.lse


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


Divergence = Callable[[Distribution, Distribution], tuple[Tensor, Tensor]]
"""(draft's q, target's p) -> divergence of each row (C,) and its gradient with respect to the draft's logits (C, Vd), a
new tensor."""


def by_autograd(value: Callable[[Tensor, Distribution], Tensor]) -> Divergence:
    """Return the divergence whose rows (C,) are `value` of the draft's log-probabilities (C, Vd) and the target's p."""

    def divergence(q: Distribution, p: Distribution) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            logits = q.logits.detach().requires_grad_()
            rows = value(logits.log_softmax(-1), p)
            (grad,) = torch.autograd.grad(rows.sum(), logits)
        return rows.detach(), grad

    return divergence


def kl(q: Distribution, p: Distribution) -> tuple[Tensor, Tensor]:
    """KL(p || q), EAGLE-3's soft cross-entropy (arXiv 2503.01840) minus the entropy of p, which has no gradient."""
    return p.negative_entropy - vecdot(p.probs, q.logits) + q.lse, q.probs - p.probs


@by_autograd
def cross_entropy(logq: Tensor, p: Distribution) -> Tensor:
    """-log q of the target's likeliest token."""
    return -logq.gather(-1, p.best[:, None])[:, 0]


@by_autograd
def reverse_kl(logq: Tensor, p: Distribution) -> Tensor:
    """KL(q || p), with p bounded away from zero, where the divergence would be infinite."""
    value: Tensor = vecdot(logq.exp(), logq - p.logs.clamp_min(-23.0))
    return value


def total_variation(q: Distribution, p: Distribution) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q), the rate of rejection in rejection sampling (Leviathan et al., arXiv 2211.17192, cor. 3.6)."""
    excess = (q.probs - p.probs).relu_()
    distance = excess.sum(-1)
    above = excess.sign_()
    return distance, above.sub_(vecdot(q.probs, above)[:, None]).mul_(q.probs)


def negative_log_acceptance(q: Distribution, p: Distribution) -> tuple[Tensor, Tensor]:
    """-log sum min(p, q): the same optimum as total variation, without its vanishing gradient (arXiv 2602.23881)."""
    distance, grad = total_variation(q, p)
    acceptance = (1 - distance).clamp_min(1e-5)
    return -acceptance.log(), grad.div_(acceptance[:, None])


def jsd(beta: float = 0.5) -> Divergence:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, 0 < beta < 1 (Agarwal et al., arXiv
    2306.13649, section 2). Divided by beta, it is close to KL(p || q) for small beta; divided by 1 - beta, it is close
    to KL(q || p) for large beta."""

    @by_autograd
    def value(logq: Tensor, p: Distribution) -> Tensor:
        q = logq.exp()
        m = (beta * p.probs + (1 - beta) * q).clamp_min(1e-30)
        # The entropy of m minus the weighted entropies of p and q.
        divergence: Tensor = beta * p.negative_entropy + (1 - beta) * vecdot(q, logq) - vecdot(m, m.log())
        return divergence

    return value


def kl_tv(q: Distribution, p: Distribution) -> tuple[Tensor, Tensor]:
    """w KL(p || q) + (1 - w) TV(p, q), with w = exp(-3 acceptance) held constant. KL dominates while the distributions
    overlap little, and total variation once they overlap much (arXiv 2602.23881)."""
    distance, pull = total_variation(q, p)
    divergence, grad = kl(q, p)
    w = (-3 * (1 - distance)).exp()
    return w * divergence + (1 - w) * distance, grad.mul_(w[:, None]).add_(pull.mul_((1 - w)[:, None]))


LOSSES: dict[str, Divergence] = {
    "kl": kl,
    "cross_entropy": cross_entropy,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "jsd": jsd(),
    "kl_tv": kl_tv,
}


def draft_loss(
    states: Tensor,
    weight: Tensor | Sequence[Tensor],
    valid: Tensor,
    hidden: Tensor,
    target_logits: Callable[[Tensor], Tensor],
    kept: Tensor,
    scale: Tensor,
    *,
    loss: str | Divergence = "kl",
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the draft's divergence from the target at R supervised labels and K depths.

    states (K, R, D): the draft's normed states; weight (Vd, D): its output head, or K of them, one for each depth;
    valid (K, R) bool: rows that exist at that depth; hidden (R, D'): the target's post-norm states that predict the
    labels; target_logits: (C, D') -> (C, V) float32; kept (Vd,) int64: the target ids of the draft vocabulary;
    scale (K,): the factor of each depth's sum.

    p is renormalised over the draft vocabulary. As in EAGLE-3, the loss leaves out rows whose likeliest token is
    outside it, because the draft cannot be right there. Returns the scaled loss () and, detached, sums (K,), `correct`
    (K, R) bool (the likeliest tokens agree), `overlap` (K,) (sum of min(p, q) over the whole target vocabulary).
    `soft_cap`: the draft's logits z are soft_cap * tanh(z / soft_cap).
    """
    divergence = LOSSES[loss] if isinstance(loss, str) else loss
    weights = (weight,) if isinstance(weight, Tensor) else weight
    total, sums, correct, overlap = _DraftLoss.apply(  # type: ignore[no-untyped-call]
        states, valid, hidden, target_logits, kept, scale, divergence, soft_cap, *weights
    )
    return total, sums, correct, overlap


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product (m, k) @ (k, n) -> (m, n).

    Float32 on a CPU uses oneDNN, through the operator that torch's own compiler calls. `@` uses MKL, which does not use
    AVX-512 on processors other than Intel's.
    """
    if a.device.type == "cpu" and a.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        made: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
        return made
    return a @ b


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        valid: Tensor,
        hidden: Tensor,
        target_logits: Callable[[Tensor], Tensor],
        kept: Tensor,
        scale: Tensor,
        divergence: Divergence,
        soft_cap: float | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        K, R, _ = states.shape
        wide = torch.promote_types(states.dtype, torch.float32)
        matrices = [weight.to(states.dtype) for weight in weights]
        grad_states = torch.empty_like(states)
        # The frozen target's own output head needs no gradient, so none is computed.
        grad_weights = [
            weight.new_zeros(weight.T.shape, dtype=wide).T if needed else None
            for weight, needed in zip(weights, ctx.needs_input_grad[-len(weights) :], strict=True)
        ]
        sums, overlap = torch.zeros(2, K, dtype=wide, device=states.device)
        correct = torch.zeros(K, R, dtype=torch.bool, device=states.device)
        with torch.autocast(states.device.type, enabled=False):
            width = target_logits(hidden[:1]).shape[-1]
            draft_ids = kept.new_full((width,), -1)  # (V,), the draft id of each target id, -1 if it has none
            draft_ids[kept] = torch.arange(len(kept), device=kept.device)
            C = max(LEAST_ROWS, CHUNK_BYTES[states.device.type] // (4 * width))
            for start in range(0, R, C):
                part = slice(start, start + C)
                best, p, acceptable = _target(target_logits(hidden[part]).to(wide), kept, draft_ids)
                for k in range(K):
                    state, live, own = states[k, part], valid[k, part], k % len(weights)
                    matrix, grad_weight = matrices[own], grad_weights[own]
                    z = matmul(state, matrix.T).to(wide)  # (C, Vd)
                    if soft_cap is not None:
                        bend = torch.tanh(z / soft_cap)
                        z = bend * soft_cap
                    q = Distribution(z)
                    value, grad = divergence(q, p)
                    if soft_cap is not None:
                        grad = grad * (1 - bend * bend)
                    grad = grad.to(states.dtype)
                    counted = live & (best >= 0)
                    rows = (counted * scale[k]).to(states.dtype)[:, None]  # scales tensors of width D, not Vd
                    grad_states[k, part] = matmul(grad, matrix) * rows
                    if grad_weight is not None:
                        grad_weight += matmul((state * rows).T, grad).T
                    sums[k] += vecdot(value, counted.to(wide))
                    correct[k, part] = (q.best == best) & live
                    shared = q.probs.clamp_(max=acceptable).sum(-1)  # in place: q is not read afterwards
                    overlap[k] += vecdot(shared, live.to(wide))
                    del z, q, grad  # before the next tensors of their size are made
        wanted = zip(grad_weights, weights, strict=True)
        ctx.save_for_backward(
            grad_states, *(None if grad is None else grad.to(weight.dtype) for grad, weight in wanted)
        )
        ctx.mark_non_differentiable(sums, correct, overlap)
        return (sums * scale).sum(), sums, correct, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, *grad_weights = ctx.saved_tensors
        by_weight = (None if grad is None else grad * grads[0] for grad in grad_weights)
        return grad_states * grads[0], *[None] * 7, *by_weight


def _target(logits: Tensor, kept: Tensor, draft_ids: Tensor) -> tuple[Tensor, Distribution, Tensor]:
    """Return, from the target's logits (C, V), which are overwritten: the likeliest token's id in the draft vocabulary
    (C,), -1 if it has none; p; and what can be accepted (C, Vd), the probabilities over the whole target vocabulary."""
    if len(kept) == logits.shape[1]:
        p = Distribution(logits)
        return draft_ids[p.best], p, p.probs
    p = Distribution(logits.index_select(1, kept))
    best = likeliest(logits)
    most = logits.gather(1, best[:, None])[:, 0]
    torch.softmax(logits, -1, out=logits)  # allocating memory of this size takes longer than the softmax
    lse = most - logits.gather(1, best[:, None])[:, 0].log_()
    return draft_ids[best], p, p.probs * (p.lse - lse).exp_()[:, None]
