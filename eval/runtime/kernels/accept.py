"""The rule `match` and the cache's compaction, a kernel each: many small operations of a round as two.

Letters: B rows, N nodes, K depth, S slots a row, L layers (keys and values apart), X numbers a slot.
"""

import torch
from torch import Tensor

from eval.runtime.accept import Acceptance, match
from heads.kernels.backend import constexpr, jit, next_power_of_2, runs_kernels, tl
from heads.tree import Proposal, ancestors

MOST_NODES = 128
"""A program compares all nodes with all: larger trees would not fit its registers."""


def accept(proposal: Proposal, choice: Tensor, depth: int) -> Acceptance:
    """`eval.runtime.accept.match` of choice (B, N), which needs no ancestors here: the path is walked from the root."""
    B, N = choice.shape
    if not runs_kernels(choice) or N > MOST_NODES:
        return accept_twin(proposal, choice, depth)
    accepted = choice.new_empty(B)
    path, emitted = choice.new_zeros(2, B, depth + 1)
    _accept[(B,)](
        proposal.tokens.contiguous(), proposal.parents.contiguous(), proposal.depths.contiguous(),
        choice.contiguous(), accepted, path, emitted, N, K=depth, PAD=next_power_of_2(N),
    )  # fmt: skip
    return Acceptance(accepted, path, emitted)


def accept_twin(proposal: Proposal, choice: Tensor, depth: int) -> Acceptance:
    """The same by ancestors."""
    return match(proposal, choice, ancestors(proposal.parents, depth), depth)


@jit
def _accept(  # type: ignore[no-untyped-def]
    TOKENS, PARENTS, DEPTHS, CHOICE, ACCEPTED, PATH, EMITTED, N, K: constexpr, PAD: constexpr,
):  # fmt: skip
    """One row: mark what follows the root level by level, take the deepest, then write its path from below."""
    b, j = tl.program_id(0), tl.arange(0, PAD)
    real = j < N
    parent = tl.load(PARENTS + b * N + j, mask=real, other=0)
    depth = tl.load(DEPTHS + b * N + j, mask=real, other=-1)
    token = tl.load(TOKENS + b * N + j, mask=real, other=-1)
    wanted = tl.load(CHOICE + b * N + parent, mask=real, other=-2)
    above = tl.load(DEPTHS + b * N + parent, mask=real, other=-9)
    follows = real & (token == wanted) & (depth == above + 1)
    alive = (j == 0).to(tl.int32)
    for level in range(1, K + 1):
        # A node of this level lives if its parent does: which nodes live, as parent by node.
        held = tl.sum(tl.where(parent[:, None] == j[None], alive[None], 0), 1)
        alive = tl.where(follows & (depth == level), held, alive)
    score = tl.where((alive > 0) & real, depth * PAD + (PAD - 1 - j), -1)
    best = tl.max(score, 0)
    node = PAD - 1 - best % PAD
    count = best // PAD
    tl.store(ACCEPTED + b, count)
    for back in range(0, K + 1):
        rung = count - back
        if rung >= 0:
            tl.store(PATH + b * (K + 1) + rung, node)
            tl.store(EMITTED + b * (K + 1) + rung, tl.load(CHOICE + b * N + node))
            node = tl.load(PARENTS + b * N + node)


def compact(cache: Tensor, length: Tensor, path: Tensor, accepted: Tensor) -> None:
    """Move the accepted nodes' entries to the slots they keep, in place.

    cache (L, B, S, X); what node path[b, i] wrote to slot length[b] + path[b, i] goes to length[b] + i, for i up to
    accepted[b]. Paths ascend, so copying in order never overwrites what is still to be read.
    """
    if not runs_kernels(cache):
        compact_twin(cache, length, path, accepted)
        return
    L, B, _, X = cache.shape
    block = min(1024, next_power_of_2(X))
    _compact[(L, B, -(-X // block))](
        cache, length, path.contiguous(), accepted, X, cache.stride(0), cache.stride(1), cache.stride(2),
        K=path.shape[1] - 1, BLOCK=block,
    )  # fmt: skip


def compact_twin(cache: Tensor, length: Tensor, path: Tensor, accepted: Tensor) -> None:
    """The same in torch operations."""
    place = torch.arange(path.shape[1], device=path.device)
    goal = length[:, None] + place
    source = torch.where(place <= accepted[:, None], length[:, None] + path, goal)
    row = torch.arange(len(length), device=path.device)[:, None]
    cache[:, row, goal] = cache[:, row, source]


@jit
def _compact(  # type: ignore[no-untyped-def]
    CACHE, LENGTH, PATH, ACCEPTED, X, by_layer, by_row, by_slot, K: constexpr, BLOCK: constexpr,
):  # fmt: skip
    layer, b, x = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    length, accepted = tl.load(LENGTH + b), tl.load(ACCEPTED + b)
    row = CACHE + layer.to(tl.int64) * by_layer + b * by_row
    for i in range(1, K + 1):  # the root stays where it is
        node = tl.load(PATH + b * (K + 1) + i)
        if (i <= accepted) & (node != i):
            value = tl.load(row + (length + node) * by_slot + x, mask=x < X)
            tl.store(row + (length + i) * by_slot + x, value, mask=x < X)
