"""The making of a draft tree beside its head, to be timed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heads.backends.selection import TRITON
from heads.backends.torch.select import Select
from heads.backends.triton.pick import Noise, best_columns
from heads.growth import grow
from heads.tree import Proposal, TreeShape, parse_shape

COLUMNS = 32000
"""Of the draft vocabulary that is timed."""


def works(text: str, device: torch.device, columns: int = COLUMNS) -> list[tuple[str, int, Callable[[], Any]]]:
    """Return the work of a tree beside its head's passes, to be timed: names, bytes read and written, work."""
    shape = parse_shape(text)
    K, drawn = shape.top_k, 1 + shape.top_k + (shape.depth - 1) * shape.top_k**2
    distributions = torch.randn(shape.depth, 1, shape.nodes, K, device=device).log_softmax(-1)
    logits = torch.randn(1, K, columns, device=device).bfloat16()
    ids, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device)
    noise = Noise(ids[:, None].expand(-1, K), one, ids)
    picks = f"{K} of {columns} picked for each of {K}"
    return [
        (
            f"nodes of {text} chosen",
            36 * (drawn + shape.nodes),
            partial(grow_from, shape, distributions, TRITON.select),
        ),
        (picks, 2 * logits.numel(), partial(best_columns, logits, K)),
        (f"{picks} with noise", 2 * logits.numel(), partial(best_columns, logits, K, None, noise)),
    ]


def grow_from(shape: TreeShape, distributions: Tensor, select: Select) -> Proposal:
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
