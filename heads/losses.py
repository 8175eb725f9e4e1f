"""What a draft law q is trained by, against the target's law p; computed in chunks of rows.

No float32 tensor of (all rows) x (vocabulary) ever exists: for one chunk the target's logits are formed once, the
draft's logits of each depth one after the other, and the gradient is taken while they are at hand (the
recomputation-free form of a fused linear cross-entropy). What is kept is the gradient of the draft's states and of its
output weights.

Letters: R supervised labels, C rows of a chunk, K depths, D hidden, V target vocabulary, Vd draft vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**28}
"""The size of one float32 (C, V) tensor; a few of them live at a time."""
LEAST_ROWS = 128
"""Rows of a chunk whatever the vocabulary: with fewer, adding to the output head's gradient takes most of the time."""


Divergence = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(log q, p, log p), each (C, Vd) -> the divergence of each row (C,) and its gradient in the draft's logits (C, Vd).

Written out, because a step spends much of its time here: through q = softmax(z), a gradient g in q becomes
q * (g - sum q g)."""


def kl(logq: Tensor, p: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q), EAGLE-3's soft cross-entropy (arXiv 2503.01840) less the entropy of p, which no gradient sees."""
    return (p * (logp - logq)).sum(-1), logq.exp().sub_(p)


def cross_entropy(logq: Tensor, p: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """-log q of the target's likeliest token."""
    best = p.argmax(-1, keepdim=True)
    grad = logq.exp()
    return -logq.gather(-1, best)[..., 0], grad.scatter_add_(-1, best, torch.full_like(grad[..., :1], -1.0))


def reverse_kl(logq: Tensor, p: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p); p is kept from zero, where the divergence would be infinite."""
    q, ratio = logq.exp(), logq - logp.clamp_min(-23.0)
    value = (q * ratio).sum(-1)
    return value, q * (ratio - value[..., None])


def total_variation(logq: Tensor, p: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q), what rejection sampling rejects (Leviathan et al., arXiv 2211.17192, corollary 3.6)."""
    q = logq.exp()
    below = (q < p).to(q.dtype)
    held = q * below
    return 1 - torch.minimum(q, p).sum(-1), q * held.sum(-1, keepdim=True) - held


def negative_log_acceptance(logq: Tensor, p: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """-log sum min(p, q): the same optimum as total variation, without its vanishing gradient (arXiv 2602.23881)."""
    distance, grad = total_variation(logq, p, logp)
    acceptance = (1 - distance).clamp_min(1e-5)
    return -acceptance.log(), grad / acceptance[..., None]


def jsd(logq: Tensor, p: Tensor, logp: Tensor, *, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, 0 < beta < 1 (Agarwal et al., arXiv
    2306.13649, section 2): divided by beta, close to KL(p || q) for a small one; by 1 - beta, to KL(q || p) for a
    large."""
    logm = torch.logaddexp(logp + math.log(beta), logq + math.log1p(-beta))
    q, ratio = logq.exp(), logq - logm
    reverse = (q * ratio).sum(-1)  # KL(q || m)
    value = beta * (p * (logp - logm)).sum(-1) + (1 - beta) * reverse
    return value, (1 - beta) * q * (ratio - reverse[..., None])


def kl_tv(logq: Tensor, p: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """w KL(p || q) + (1 - w) TV(p, q), w = exp(-3 acceptance) held fixed: KL leads while the laws share little, and
    total variation once they share much (arXiv 2602.23881)."""
    distance, pull = total_variation(logq, p, logp)
    divergence, grad = kl(logq, p, logp)
    w = (-3 * (1 - distance)).exp()
    return w * divergence + (1 - w) * distance, grad.mul_(w[..., None]) + (1 - w[..., None]) * pull


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
    states: Tensor,
    weight: Tensor,
    valid: Tensor,
    hidden: Tensor,
    target_logits: Callable[[Tensor], Tensor],
    kept: Tensor,
    scale: Tensor,
    *,
    loss: str | Divergence = "kl",
    soft_cap: float | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The draft's divergence from the target at R supervised labels and K depths.

    states (K, R, D): the draft's normed states; weight (Vd, D): its output head; valid (K, R) bool: rows that exist at
    that depth; hidden (R, D'): the target's post-norm states that predict the labels; target_logits: (C, D') -> (C, V)
    float32; kept (Vd,) int64: the target ids of the draft vocabulary; scale (K,): what each depth's sum is multiplied
    by.

    p is renormalised over the draft vocabulary, and a row whose likeliest token lies outside it is left out of the
    loss, as in EAGLE-3: there the draft cannot be right. Returns the scaled loss (), and detached: sums (K,), `correct`
    (K, R) bool (the likeliest tokens agree), `overlap` (K,) (sum of min(p, q) over the whole target vocabulary).
    `soft_cap`: the draft's logits z are soft_cap * tanh(z / soft_cap). `chunk` sets the rows handled at once.
    """
    divergence = LOSSES[loss] if isinstance(loss, str) else loss
    total, sums, correct, overlap = _DraftLoss.apply(  # type: ignore[no-untyped-call]
        states, weight, valid, hidden, target_logits, kept, scale, divergence, soft_cap, chunk
    )
    return total, sums, correct, overlap


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        valid: Tensor,
        hidden: Tensor,
        target_logits: Callable[[Tensor], Tensor],
        kept: Tensor,
        scale: Tensor,
        divergence: Divergence,
        soft_cap: float | None,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        K, R, _ = states.shape
        wide = torch.promote_types(states.dtype, torch.float32)
        matrix = weight.to(states.dtype)
        grad_states = torch.empty_like(states)
        # An output head that is the frozen target's own has no gradient, and gets none computed.
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        sums, overlap = torch.zeros(2, K, dtype=wide, device=states.device)
        correct = torch.zeros(K, R, dtype=torch.bool, device=states.device)
        start = 0
        with torch.autocast(states.device.type, enabled=False):
            while start < R:
                if chunk is None:
                    width = target_logits(hidden[:1]).shape[-1]
                    chunk = max(LEAST_ROWS, CHUNK_BYTES[states.device.type] // (4 * width))
                part = slice(start, start + chunk)
                start += chunk
                logits = target_logits(hidden[part]).to(wide)  # (C, V)
                best = logits.argmax(-1)
                mass = logits.logsumexp(-1)  # over the whole vocabulary
                logits = logits[:, kept]  # (C, Vd)
                inside = kept[logits.argmax(-1)] == best
                logp = logits.log_softmax(-1)
                p = logp.exp()
                # What the draft vocabulary leaves out cannot be accepted: the target's law over the whole vocabulary.
                whole = p * (logits.logsumexp(-1) - mass).exp_()[:, None]
                for k in range(K):
                    state = states[k, part]
                    live = valid[k, part]
                    z = (state @ matrix.T).to(wide)  # (C, Vd)
                    if soft_cap is not None:
                        bend = torch.tanh(z / soft_cap)
                        z = bend * soft_cap
                    logq = z.log_softmax(-1)
                    value, grad = divergence(logq, p, logp)
                    if soft_cap is not None:
                        grad = grad * (1 - bend * bend)
                    counted = live & inside
                    grad = (grad.mul_((counted * scale[k])[:, None])).to(states.dtype)
                    grad_states[k, part] = grad @ matrix
                    if grad_weight is None:
                        pass
                    elif grad.dtype == wide:
                        grad_weight.addmm_(grad.T, state)  # in place: the matrix is large and the chunks are many
                    else:
                        grad_weight += grad.T @ state
                    sums[k] += (value * counted).sum()
                    correct[k, part] = (kept[logq.argmax(-1)] == best) & live
                    overlap[k] += (torch.minimum(logq.exp_(), whole).sum(-1) * live).sum()
        ctx.save_for_backward(grad_states, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(sums, correct, overlap)
        return (sums * scale).sum(), sums, correct, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        by_weight = None if grad_weight is None else grad_weight * grads[0]
        return grad_states * grads[0], by_weight, *[None] * 8
