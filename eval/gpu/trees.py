"""Draft trees on a GPU: that they are drawn and grow as on a CPU, and one to time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.runtime.distribution import RowSampling
from eval.runtime.sampling import Sampling
from heads.backends.selection import TORCH, TRITON
from heads.backends.torch.select import Select
from heads.backends.triton.pick import Noise, best_columns
from heads.growth import grow
from heads.tree import Proposal, TreeShape, parse_shape

CUDA = torch.device("cuda")
COLUMNS = 32000
"""Of the draft vocabulary that is timed."""


def trees_grow_as_on_a_cpu(device: torch.device = CUDA) -> None:
    """Bit for bit, of several sizes, also over distributions that tie and such as are no numbers."""
    draw = torch.Generator().manual_seed(0)
    for text in ("tree:6x8x32", "tree:8x10x60", "tree:3x13x300", "tree:1x5x4", "static:3.2.1", "static:9.9.9"):
        shape = parse_shape(text)
        for kind in ("random", "flat", "broken"):
            distributions = torch.randn(shape.depth, 3, shape.nodes, 16, generator=draw).log_softmax(-1)
            distributions = distributions.sort(dim=-1, descending=True).values
            if kind == "flat":
                distributions.zero_()
            if kind == "broken":
                distributions[:, 0, 1] = torch.nan
            ours, theirs = (
                vars(grown(shape, x, backend.select))
                for x, backend in ((distributions.to(device), TRITON), (distributions, TORCH))
            )
            for name, found in ours.items():
                same = found is None or torch.equal(found.cpu().nan_to_num(), theirs[name].nan_to_num())
                assert same, f"{name} of {text} of {kind} distributions"


def picks_are_those_of_tensor_operations(device: torch.device = CUDA) -> None:
    """Greedy rows beside sampled ones, over a vocabulary and a part of one, from levels of several widths."""
    draw = torch.Generator().manual_seed(0)
    rows = RowSampling(3, device)
    for row, sampling in enumerate((Sampling(), Sampling(0.7, seed=-5), Sampling(1.2, seed=2**60))):
        rows.set_row(row, sampling)
    for W, V, count in ((1, 32000, 1), (8, 5000, 8), (10, 32000, 10), (20, 700, 3)):
        logits = 3 * torch.randn(3, W, V, generator=draw).to(device)
        logits[:, :, V // 2 + 9 : V // 2 + 1200] = -torch.inf
        ids = torch.randperm(2 * V, generator=draw)[:V].sort().values.to(device)
        at = torch.randint(2**40, (3, W), generator=draw).to(device)
        for positions in (at, at[:, :1].expand(-1, W)):
            for names in (None, ids):
                tokens, logp = rows.pick_by_kernels(logits, positions, count, names)
                expected, distribution = rows.pick_in_tensors(logits, positions, count, names)
                assert torch.equal(tokens, expected), (W, V, count)
                torch.testing.assert_close(logp, distribution, atol=2e-5, rtol=2e-5)


def works(text: str, device: torch.device) -> list[tuple[str, int, Callable[[], Any]]]:
    """What a tree takes beside its head's passes, to be timed: names, the bytes it must read and write, work."""
    shape = parse_shape(text)
    K, drawn = shape.top_k, 1 + shape.top_k + (shape.depth - 1) * shape.top_k**2
    distributions = torch.randn(shape.depth, 1, shape.nodes, K, device=device).log_softmax(-1)
    logits = torch.randn(1, K, COLUMNS, device=device).bfloat16()
    ids, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device)
    noise = Noise(ids[:, None].expand(-1, K), one, ids)
    picks = f"{K} of {COLUMNS} picked for each of {K}"
    return [
        (f"nodes of {text} chosen", 36 * (drawn + shape.nodes), partial(grown, shape, distributions)),
        (picks, 2 * logits.numel(), partial(best_columns, logits, K)),
        (f"{picks} with noise", 2 * logits.numel(), partial(best_columns, logits, K, None, noise)),
    ]


def grown(shape: TreeShape, distributions: Tensor, select: Select) -> Proposal:
    """A tree whose draws are columns 0, 1, ... with the log-probabilities distributions (K, B, N, R) of its levels."""
    columns, level = torch.arange(distributions.shape[3], device=distributions.device), 0

    def pick(logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        nonlocal level
        level += 1
        logp = distributions[level - 1, :, : logits.shape[1], :count]
        return columns[:count].expand(logp.shape), logp

    def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
        return distributions[0, :, :1].expand(-1, tokens.shape[1], -1)

    root = torch.arange(distributions.shape[1], device=distributions.device)
    return grow(shape, root, root, expand(root[:, None], root, root, 0), pick, expand, None, select)
