"""What a draft law q is trained by, against the target's law p; computed in chunks of rows.

No float32 tensor of (all rows) x (vocabulary) ever exists: for one chunk the target's logits are formed once, the
draft's logits of each depth one after the other, and the gradient is taken while they are at hand (the
recomputation-free form of a fused linear cross-entropy). What is kept is the gradient of the draft's states and of its
output weights.

Letters: R supervised labels, C rows of a chunk, K depths, D hidden, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**28}
"""The size of one float32 (C, V) tensor; a few of them live at a time."""


def kl(logq: Tensor, p: Tensor) -> Tensor:
    """KL(p || q), EAGLE-3's soft cross-entropy (arXiv 2503.01840) less the entropy of p, which no gradient sees."""
    return (torch.xlogy(p, p) - p * logq).sum(-1)


def cross_entropy(logq: Tensor, p: Tensor) -> Tensor:
    """-log q of the target's likeliest token."""
    return -logq.gather(-1, p.argmax(-1, keepdim=True))[..., 0]


def reverse_kl(logq: Tensor, p: Tensor) -> Tensor:
    """KL(q || p); p is kept from zero, where the divergence would be infinite."""
    return (logq.exp() * (logq - p.clamp_min(1e-10).log())).sum(-1)


def total_variation(logq: Tensor, p: Tensor) -> Tensor:
    """1 - sum min(p, q), what rejection sampling rejects (Leviathan et al., arXiv 2211.17192, corollary 3.6)."""
    return 1 - torch.minimum(logq.exp(), p).sum(-1)


def negative_log_acceptance(logq: Tensor, p: Tensor) -> Tensor:
    """-log sum min(p, q): the same optimum as total variation, without its vanishing gradient (arXiv 2602.23881)."""
    return -torch.minimum(logq.exp(), p).sum(-1).clamp_min(1e-5).log()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl,
    "cross_entropy": cross_entropy,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
}
"""Name -> (log q (C, Vd), p (C, Vd)) -> (C,)."""


def draft_loss(
    states: Tensor,
    weight: Tensor,
    valid: Tensor,
    hidden: Tensor,
    target_logits: Callable[[Tensor], Tensor],
    kept: Tensor,
    scale: Tensor,
    *,
    loss: str = "kl",
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The draft's divergence from the target at R supervised labels and K depths.

    states (K, R, D): the draft's normed states; weight (Vd, D): its output head; valid (K, R) bool: rows that exist at
    that depth; hidden (R, D'): the target's post-norm states that predict the labels; target_logits: (C, D') -> (C, V)
    float32; kept (Vd,) int64: the target ids of the draft vocabulary; scale (K,): what each depth's sum is multiplied
    by.

    p is renormalised over the draft vocabulary, and a row whose likeliest token lies outside it is left out of the
    loss, as in EAGLE-3: there the draft cannot be right. Returns the scaled loss (), and detached: sums (K,), `correct`
    (K, R) bool (the likeliest tokens agree), `overlap` (K,) (sum of min(p, q) over the whole target vocabulary).
    """
    how = (LOSSES[loss], chunk_bytes or CHUNK_BYTES[states.device.type])
    total, sums, correct, overlap = _DraftLoss.apply(  # type: ignore[no-untyped-call]
        states, weight, valid, hidden, target_logits, kept, scale, *how
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
        divergence: Callable[[Tensor, Tensor], Tensor],
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        K, R, _ = states.shape
        wide = torch.promote_types(states.dtype, torch.float32)
        matrix = weight.to(states.dtype)
        grad_states, grad_weight = torch.empty_like(states), torch.zeros_like(weight, dtype=wide)
        sums, overlap = torch.zeros(2, K, dtype=wide, device=states.device)
        correct = torch.zeros(K, R, dtype=torch.bool, device=states.device)
        rows = start = 0
        with torch.autocast(states.device.type, enabled=False):
            while start < R:
                if not rows:
                    width = target_logits(hidden[:1]).shape[-1]
                    rows = max(16, chunk_bytes // (4 * width))
                part = slice(start, start + rows)
                start += rows
                logits = target_logits(hidden[part]).to(wide)  # (C, V)
                best = logits.argmax(-1)
                mass = logits.logsumexp(-1)  # over the whole vocabulary
                logits = logits[:, kept]  # (C, Vd)
                inside = kept[logits.argmax(-1)] == best
                p = logits.softmax(-1)
                share = (logits.logsumexp(-1) - mass).exp()  # how much of the target's law the draft vocabulary holds
                for k in range(K):
                    state = states[k, part]
                    live = valid[k, part]
                    with torch.enable_grad():
                        draft = (state @ matrix.T).to(wide).requires_grad_()  # (C, Vd)
                        logq = draft.log_softmax(-1)
                        total = (divergence(logq, p) * (live & inside)).sum()
                        (grad,) = torch.autograd.grad(total, draft)
                    grad = (grad * scale[k]).to(states.dtype)
                    grad_states[k, part] = grad @ matrix
                    grad_weight += (grad.T @ state).to(wide)
                    sums[k] += total.detach()
                    overlap[k] += (torch.minimum(logq.detach().exp(), p * share[:, None]).sum(-1) * live).sum()
                    correct[k, part] = (kept[logq.argmax(-1)] == best) & live
        ctx.save_for_backward(grad_states, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(sums, correct, overlap)
        return (sums * scale).sum(), sums, correct, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states * grads[0], grad_weight * grads[0], *[None] * 7
