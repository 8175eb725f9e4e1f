"""Time of a training step's loss: the gradient of `kl` as it is written out in `heads.losses`, and by autograd.

    python scripts/bench_losses.py --repeats 30

At the quickstart's size. Each repeat runs both forms, forward and backward, one after the other. The least time of each
counts, so that other work on the machine matters less. A gradient is worth writing out from a ratio of 1.3 on.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence

from eval.command import Parser, count, exit_status


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Compare the gradient of kl: written out, and by autograd.")
    parser.add_argument("--repeats", type=count, default=30, help="of each form")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import torch
    from torch import Tensor
    from torch.linalg import vecdot

    from heads.losses import LOSSES, Distribution, Divergence, by_autograd, draft_loss

    @by_autograd
    def plain_kl(logq: Tensor, p: Distribution) -> Tensor:
        value: Tensor = p.negative_entropy - vecdot(p.probs, logq)
        return value

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
    forms = LOSSES["kl"], plain_kl
    least = [math.inf, math.inf]
    for _ in range(options.repeats):
        found = [run(form) for form in forms]
        least = [min(a, b) for a, (b, _) in zip(least, found, strict=True)]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-3)
    written, auto = least
    print(f"written out {1e3 * written:.1f} ms, autograd {1e3 * auto:.1f} ms, ratio {auto / written:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
