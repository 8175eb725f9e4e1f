"""Time two forms of a training step's loss: explicit gradients or autograd, and products with oneDNN or `@`.

    python scripts/bench_losses.py --repeats 30

The gradients are those of `kl` and `total_variation` in `heads.losses`, at the size of the quickstart. Each repeat runs
both forms, one after the other. The minimum time of each counts, so that other work on the machine matters less. A form
that needs more code is worth it if the ratio is at least 1.3. The explicit gradients need no more code.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from eval.command import Parser, count, exit_status


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("Compare the forms of the loss: of its gradient, and of its products.")
    parser.add_argument("--repeats", type=count, default=30, help="of each form")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import torch
    from torch import Tensor
    from torch.linalg import vecdot

    from heads.losses import LOSSES, Distribution, Divergence, by_autograd, draft_loss, matmul

    @by_autograd
    def plain_kl(logq: Tensor, p: Distribution) -> Tensor:
        value: Tensor = p.negative_entropy - vecdot(p.probs, logq)
        return value

    @by_autograd
    def plain_total_variation(logq: Tensor, p: Distribution) -> Tensor:
        return (logq.exp() - p.probs).relu().sum(-1)

    K, R, D, V, Vd = 4, 508, 192, 4096, 2048
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(V, D, generator=generator) / math.sqrt(D)
    hidden = 3 * torch.randn(R, D, generator=generator)
    states = hidden + torch.randn(K, R, D, generator=generator)
    states.requires_grad_()
    weight = target[:Vd].clone().requires_grad_()
    valid, kept, scale = torch.ones(K, R, dtype=torch.bool), torch.arange(Vd), torch.full((K,), 1 / R)

    def grad(divergence: Divergence) -> Tensor:
        loss, *_ = draft_loss(states, weight, valid, hidden, lambda h: h @ target.T, kept, scale, loss=divergence)
        return torch.autograd.grad(loss, states)[0]

    print(f"{torch.get_num_threads()} threads, K = {K}, R = {R}, D = {D}, V = {V}, Vd = {Vd}")
    rows, matrix = states.detach().flatten(0, 1), weight.detach()
    logits = rows @ matrix.T
    for name, plain in (("kl", plain_kl), ("total_variation", plain_total_variation)):
        compare(f"loss {name}", options.repeats, written_out=partial(grad, LOSSES[name]), autograd=partial(grad, plain))
    for name, pair in (("logits", (rows, matrix.T)), ("gradient of states", (logits, matrix))):
        compare(name, options.repeats, onednn=partial(matmul, *pair), torch=partial(torch.matmul, *pair))
    return 0


def compare(what: str, repeats: int, **forms: Callable[[], Any]) -> None:
    """Check that two forms compute the same, and print the minimum time of each and their ratio."""
    from torch.testing import assert_close

    (first, one), (second, other) = forms.items()
    expected = other()
    assert_close(one(), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-3)
    least = {first: math.inf, second: math.inf}
    for _ in range(repeats):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            least[name] = min(least[name], time.perf_counter() - start)
    times = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in least.items())
    print(f"{what}: {times}, ratio {least[second] / least[first]:.2f}")


if __name__ == "__main__":
    sys.exit(exit_status(main))
