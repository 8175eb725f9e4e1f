"""Time of a training step's loss: gradients written out against those that autograd finds, at the quickstart's size.

    python scripts/bench_losses.py --repeats 30

Each repeat runs both forms of a loss, forward and backward, one after the other. The least time of each counts, so that
other work on the machine matters less. A gradient is worth writing out from a ratio of 1.3 on (that of `kl`, the
default, is one subtraction). `negative_log_acceptance` and `kl_tv` scale and add the gradients of others.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence

from eval.command import Parser, count, exit_status


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Compare gradients of the losses: written out, and by autograd.")
    parser.add_argument("--repeats", type=count, default=30, help="of each form of each loss")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import torch
    from torch import Tensor
    from torch.linalg import vecdot

    from heads.losses import LOSSES, Distribution, Divergence, by_autograd, draft_loss

    Pair = tuple[Tensor, Tensor]

    def cross_entropy(q: Distribution, p: Distribution) -> Pair:
        best = p.best[:, None]
        value = q.lse - q.logits.gather(-1, best)[:, 0]
        return value, q.probs.scatter_add(-1, best, torch.full_like(q.probs[:, :1], -1.0))

    def reverse_kl(q: Distribution, p: Distribution) -> Pair:
        ratio = q.logs - p.logs.clamp_min(-23.0)
        value = vecdot(q.probs, ratio)
        return value, ratio.sub_(value[:, None]).mul_(q.probs)

    def total_variation(q: Distribution, p: Distribution) -> Pair:
        below = (q.probs < p.probs).to(q.probs.dtype).mul_(q.probs)
        return 1 - torch.minimum(q.probs, p.probs).sum(-1), (q.probs * below.sum(-1, keepdim=True)).sub_(below)

    def jsd(q: Distribution, p: Distribution) -> Pair:
        ratio = q.logs - torch.logaddexp(p.logs, q.logs) + math.log(2)
        reverse = vecdot(q.probs, ratio)
        forward = vecdot(p.probs, p.logs - q.logs + ratio)
        return (forward + reverse) / 2, ratio.sub_(reverse[:, None]).mul_(q.probs).div_(2)

    @by_autograd
    def plain_kl(logq: Tensor, p: Distribution) -> Tensor:
        value: Tensor = p.negative_entropy - vecdot(p.probs, logq)
        return value

    forms: dict[str, tuple[Divergence, Divergence]] = {
        "kl": (LOSSES["kl"], plain_kl),
        "cross_entropy": (cross_entropy, LOSSES["cross_entropy"]),
        "reverse_kl": (reverse_kl, LOSSES["reverse_kl"]),
        "total_variation": (total_variation, LOSSES["total_variation"]),
        "jsd": (jsd, LOSSES["jsd"]),
    }
    K, R, D, V, Vd = 4, 508, 192, 4096, 2048
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(V, D, generator=generator) / math.sqrt(D)
    hidden = 3 * torch.randn(R, D, generator=generator)
    states = hidden + torch.randn(K, R, D, generator=generator)
    states.requires_grad_()
    weight = target[:Vd].clone().requires_grad_()
    valid, kept, scale = torch.ones(K, R, dtype=torch.bool), torch.arange(Vd), torch.full((K,), 1 / R)

    def run(divergence: Divergence) -> tuple[float, Tensor]:
        start = time.perf_counter()
        loss, *_ = draft_loss(states, weight, valid, hidden, lambda h: h @ target.T, kept, scale, loss=divergence)
        (grad,) = torch.autograd.grad(loss, states)
        return time.perf_counter() - start, grad

    print(f"{torch.get_num_threads()} threads, K = {K}, R = {R}, D = {D}, V = {V}, Vd = {Vd}")
    print(f"{'loss':<24} {'written out':>12} {'autograd':>9} {'ratio':>6}")
    for name, pair in forms.items():
        least = [math.inf, math.inf]
        for _ in range(options.repeats):
            found = [run(form) for form in pair]
            least = [min(a, b) for a, (b, _) in zip(least, found, strict=True)]
        torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-3)
        written, auto = least
        print(f"{name:<24} {1e3 * written:>9.1f} ms {1e3 * auto:>6.1f} ms {auto / written:>6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
