"""Choice of a draft tree's nodes on a GPU, as `heads.backends.torch.select`: one kernel per level, and for dynamic
trees one more at the end.

Letters: B rows of the batch, T nodes drawn including the root, N nodes kept, K children drawn per node and nodes
expanded per level, W nodes expanded at the previous level (1 or K), R children drawn for each, M nodes placed at a
level of a static tree, P of them expanded.
"""

import torch
from torch import Tensor

from heads.backends.torch import select
from heads.backends.torch.select import Beam, Level, Nodes, first_node
from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl, triton

MOST_CHILDREN = 1024
"""Maximum number of a level's draws that a kernel compares. With more, torch's operations run."""
MOST_NODES = 4096
"""Maximum number of a tree's nodes that a kernel ranks. With more, torch's operations run."""
COMPARED = 4096
"""Number of comparisons, or of path entries, that a program holds at once."""
PLACED = 256
"""Maximum number of nodes of a static tree's level in a program."""


def widen(
    nodes: Nodes, root: Tensor, beam: Beam | None, picked: Tensor, logp: Tensor, level: int, *, last: bool
) -> Beam | None:
    """Same as `heads.backends.torch.select.widen`, as a kernel."""
    (B, W, K), T = picked.shape, nodes.tokens.shape[1]
    if logp.dtype != torch.float32 or W * K > MOST_CHILDREN:
        return select.widen(nodes, root, beam, picked, logp, level, last=last)
    ids, paths = root.new_empty(3, B, K), root.new_empty(B, K, level)
    after = Beam(ids[0], logp.new_empty(B, K), ids[1], ids[2], paths)
    above = after if beam is None else beam
    pad, levels = next_power_of_2(W * K), next_power_of_2(level)
    _widen[(B,)](
        root, above.scores, above.nodes, above.paths, picked, logp, *picked.stride(), *logp.stride(),
        nodes.tokens, nodes.parents, nodes.scores, nodes.expanded,
        after.tokens, after.scores, after.nodes, after.rows, after.paths,
        T, first_node(K, level), level, K, W * K, FIRST=beam is None, LAST=last,
        PAD=pad, TILE=min(pad, COMPARED // pad), LEVELS=levels, CHUNK=min(levels, COMPARED // pad),
    )  # fmt: skip
    return None if last else after


@jit
def _widen(  # type: ignore[no-untyped-def]
    ROOT, BEAM_SCORES, BEAM_NODES, BEAM_PATHS, PICKED, LOGP, p_b, p_w, p_k, l_b, l_w, l_k,
    TOKENS, PARENTS, SCORES, PLACES, NEXT_TOKENS, NEXT_SCORES, NEXT_NODES, NEXT_ROWS, NEXT_PATHS,
    T, first, level, K, C,
    FIRST: constexpr, LAST: constexpr, PAD: constexpr, TILE: constexpr, LEVELS: constexpr, CHUNK: constexpr,
):  # fmt: skip
    """Process one row: write its C draws to the tree, and those with fewer than K better draws to the next beam."""
    b, c = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    real, row = c < C, c // K
    if FIRST:
        tl.store(TOKENS + b * T, tl.load(ROOT + b))
        tl.store(PARENTS + b * T, 0)
        tl.store(SCORES + b * T, 0.0)
        tl.store(PLACES + b * T, -1)
    token = tl.load(PICKED + b * p_b + row * p_w + c % K * p_k, mask=real, other=0)
    total = _total(BEAM_SCORES + b * K, LOGP + b * l_b, l_w, l_k, c, K, C, FIRST)
    parent = tl.zeros([PAD], tl.int64) if FIRST else tl.load(BEAM_NODES + b * K + row, mask=real, other=0)
    at = b * T + first + c
    tl.store(TOKENS + at, token, mask=real)
    tl.store(SCORES + at, total, mask=real)
    tl.store(PARENTS + at, parent, mask=real)
    if LAST:
        tl.store(PLACES + at, -1, mask=real)
        return
    if FIRST:
        rank = c
    else:
        rank = tl.zeros([PAD], tl.int32)
        for start in range(0, PAD, TILE):
            o = start + tl.arange(0, TILE)
            other = _total(BEAM_SCORES + b * K, LOGP + b * l_b, l_w, l_k, o, K, C, FIRST)
            better = (other[None] > total[:, None]) | ((other[None] == total[:, None]) & (o[None] < c[:, None]))
            rank += tl.sum(better.to(tl.int32), 1)
    kept = real & (rank < K)
    place = (level - 1) * K + rank
    tl.store(PLACES + at, tl.where(kept, place, -1), mask=real)
    to = b * K + rank
    tl.store(NEXT_TOKENS + to, token, mask=kept)
    tl.store(NEXT_SCORES + to, total, mask=kept)
    tl.store(NEXT_NODES + to, first + c, mask=kept)
    tl.store(NEXT_ROWS + to, row, mask=kept)
    for start in range(0, LEVELS, CHUNK):
        i = start + tl.arange(0, CHUNK)
        above = kept[:, None] & (i < level - 1)[None]
        node = tl.load(BEAM_PATHS + ((b * K + row) * (level - 1))[:, None] + i[None], mask=above, other=0)
        tl.store(NEXT_PATHS + (to * level)[:, None] + i[None], node, mask=above)
    tl.store(NEXT_PATHS + to * level + level - 1, place, mask=kept)


@jit
def _total(SCORES, LOGP, l_w, l_k, c, K, C, FIRST: constexpr):  # type: ignore[no-untyped-def]
    """Return the scores of draws c; -inf for NaN scores and for c beyond the last draw."""
    total = tl.load(LOGP + c // K * l_w + c % K * l_k, mask=c < C, other=-float("inf"))
    if not FIRST:
        total = tl.load(SCORES + c // K, mask=c < C, other=0.0) + total
    return tl.where(total == total, total, -float("inf"))


def prune(nodes: Nodes, penalties: Tensor, count: int) -> Nodes:
    """Same as `heads.backends.torch.select.prune`, as a kernel."""
    B, T = nodes.tokens.shape
    if nodes.scores.dtype != torch.float32 or T > MOST_NODES:
        return select.prune(nodes, penalties, count)
    tokens, parents, expanded, depths = nodes.tokens.new_empty(4, B, count)
    kept = Nodes(tokens, parents, nodes.scores.new_empty(B, count), expanded, depths)
    pad = next_power_of_2(T)
    _prune[(B,)](
        nodes.tokens, nodes.parents, nodes.scores, nodes.expanded, nodes.depths, penalties,
        kept.tokens, kept.parents, kept.scores, kept.expanded, kept.depths, T, count,
        BITS=4 if pad <= 1024 else 2, PAD=pad, num_warps=4 if pad <= 512 else 8,
    )  # fmt: skip
    return kept


@jit
def _prune(  # type: ignore[no-untyped-def]
    TOKENS, PARENTS, SCORES, PLACES, DEPTHS, PENALTIES,
    KEPT_TOKENS, KEPT_PARENTS, KEPT_SCORES, KEPT_PLACES, KEPT_DEPTHS, T, N,
    BITS: constexpr, PAD: constexpr,
):  # fmt: skip
    """Process one row: find the N-th best key, BITS bits at a time from the highest; then keep all better keys, and the
    first of the equal ones."""
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    real = i < T
    score = tl.load(SCORES + b * T + i, mask=real, other=0.0)
    rank = tl.where(i == 0, float("inf"), score - tl.load(PENALTIES + i, mask=real, other=0.0))
    bits = tl.where(rank == 0, 0.0, rank).to(tl.uint32, bitcast=True)  # -0.0 becomes 0.0
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)  # integers in the order of the floats
    key = tl.where(real, key, 0)
    least, digit = tl.zeros([], tl.uint32), tl.arange(0, 1 << BITS).to(tl.uint32)
    for step in range(0, 32, BITS):
        trial = least | (digit << (32 - BITS - step))
        reached = tl.sum((key[:, None] >= trial[None]).to(tl.int32), 0) >= N  # True for digits up to the N-th best's
        least = tl.max(tl.where(reached, trial, 0), 0)
    better, equal = (key > least).to(tl.int32), (key == least).to(tl.int32)
    kept = (better == 1) | ((equal == 1) & (tl.cumsum(equal, 0) <= N - tl.sum(better, 0)))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    parent = tl.load(PARENTS + b * T + i, mask=kept, other=0)
    to = b * N + place
    tl.store(KEPT_PARENTS + to, tl.gather(place, parent.to(tl.int32), 0), mask=kept)
    tl.store(KEPT_TOKENS + to, tl.load(TOKENS + b * T + i, mask=kept), mask=kept)
    tl.store(KEPT_SCORES + to, score, mask=kept)
    tl.store(KEPT_PLACES + to, tl.load(PLACES + b * T + i, mask=kept), mask=kept)
    tl.store(KEPT_DEPTHS + to, tl.load(DEPTHS + i, mask=kept), mask=kept)


def place(tokens: Tensor, scores: Tensor, root: Tensor, picked: Tensor, logp: Tensor, level: Level) -> Tensor:
    """Same as `heads.backends.torch.select.place`, as a kernel."""
    (B, N), M, P = tokens.shape, len(level.row), len(level.expanded)
    beam = root.new_empty(B, P)
    _place[(B, triton.cdiv(M, PLACED))](
        root, picked, logp, *picked.stride(), *logp.stride(), level.row, level.rank, level.above, level.expanded,
        tokens, scores, beam, N, M, P, level.first, FIRST=level.first == 1, BLOCK=min(PLACED, next_power_of_2(M)),
    )  # fmt: skip
    return beam


@jit
def _place(  # type: ignore[no-untyped-def]
    ROOT, PICKED, LOGP, p_b, p_w, p_k, l_b, l_w, l_k, ROW, RANK, ABOVE, EXPANDED, TOKENS, SCORES, BEAM, N, M, P,
    first, FIRST: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Write BLOCK nodes of a level of one row, and the tokens of BLOCK of its expanded nodes."""
    b, m = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if FIRST and tl.program_id(1) == 0:
        tl.store(TOKENS + b * N, tl.load(ROOT + b))
        tl.store(SCORES + b * N, 0.0)
    real, at = m < M, b * N + first + m
    row, rank = tl.load(ROW + m, mask=real, other=0), tl.load(RANK + m, mask=real, other=0)
    score = tl.load(LOGP + b * l_b + row * l_w + rank * l_k, mask=real, other=0.0)
    if not FIRST:
        score = tl.load(SCORES + b * N + tl.load(ABOVE + m, mask=real, other=0), mask=real, other=0.0) + score
    tl.store(TOKENS + at, tl.load(PICKED + b * p_b + row * p_w + rank * p_k, mask=real), mask=real)
    tl.store(SCORES + at, score, mask=real)
    own = tl.load(EXPANDED + m, mask=m < P, other=0)
    row, rank = tl.load(ROW + own, mask=m < P, other=0), tl.load(RANK + own, mask=m < P, other=0)
    tl.store(BEAM + b * P + m, tl.load(PICKED + b * p_b + row * p_w + rank * p_k, mask=m < P), mask=m < P)
