"""Choosing the nodes of a draft tree: one kernel a level and one at the end, or a level's kernel alone.

A dynamic tree (EAGLE-2, arXiv 2406.16858, section 4) draws K children of each of the K likeliest nodes of a level, and
keeps the N likeliest of all that it drew. `widen` takes a level's draws in and finds the next nodes to expand; `prune`
keeps the best. A static tree knows which draws it takes: `place` takes them in.

Nodes are ranked by score, the lowest index first among equals. A parent's score is never below its child's, and its
index is lower, so that it is never left out for its child: not where both scores are -inf or the draft was certain of
the child, and not where a sum of logarithms is so large that a penalty of depth is lost in its last bit. A distribution
that is not a number counts as one that gives its tokens no chance, for it must not displace the root.

Letters: B rows of the batch, T nodes drawn, root included, N of them kept, K children drawn for a node and nodes
expanded at a level, W nodes expanded at the level before (1 or K), R children drawn for each, M nodes placed at a level
of a static tree, P of them expanded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.backends.triton.runtime import constexpr, jit, next_power_of_2, runs_kernels, tl, triton

MOST_CHILDREN = 1024
"""Draws of a level that a program compares with each other; more take torch's operations."""
MOST_NODES = 4096
"""Draws of a tree that a program ranks; likewise."""
COMPARED = 4096
"""Comparisons, or places of paths, that a program holds at once."""
PLACED = 256
"""Nodes of a static tree's level that a program takes."""


@dataclass(frozen=True)
class Nodes:
    """A tree's nodes, the root first, parents before children."""

    tokens: Tensor  # (B, T) int64
    parents: Tensor  # (B, T) int64
    scores: Tensor  # (B, T) float32 as a rule, log-probability of the path
    places: Tensor  # (B, T) int64, each one's place among the expanded; -1 where it is not
    depths: Tensor  # (T,) int64 while a tree grows, (B, N) when it is pruned


@dataclass(frozen=True)
class Beam:
    """The W nodes that are expanded at one level; `heads.growth.Expand` says what rows and paths are."""

    tokens: Tensor  # (B, W) int64
    scores: Tensor  # (B, W) float32
    nodes: Tensor  # (B, W) int64
    rows: Tensor  # (B, W) int64
    paths: Tensor  # (B, W, level) int64


def new_nodes(root: Tensor, depths: Tensor, dtype: torch.dtype = torch.float32) -> Nodes:
    """Room for nodes of these depths (T,) below root (B,), with scores of that type; what is not drawn yet is
    padding."""
    B, T = len(root), len(depths)
    tokens, parents, places = root.new_empty(3, B, T)
    return Nodes(tokens, parents, root.new_empty(B, T, dtype=dtype), places, depths)


def widen(
    nodes: Nodes, root: Tensor, beam: Beam | None, picked: Tensor, logp: Tensor, level: int, *, last: bool
) -> Beam | None:
    """Take in picked and logp (B, W, K), the children of the beam's nodes and their log-probabilities, best first; of
    the root (B,), whose beam is None, at level 1. Returns the next beam, None at the last level."""
    (B, W, K), T = picked.shape, nodes.tokens.shape[1]
    if logp.dtype != torch.float32 or W * K > MOST_CHILDREN or not runs_kernels(logp):
        return widen_twin(nodes, root, beam, picked, logp, level, last=last)
    ids, paths = root.new_empty(3, B, K), root.new_empty(B, K, level)
    after = Beam(ids[0], logp.new_empty(B, K), ids[1], ids[2], paths)
    above = after if beam is None else beam
    pad, levels = next_power_of_2(W * K), next_power_of_2(level)
    _widen[(B,)](
        root, above.scores, above.nodes, above.paths, picked, logp, *picked.stride(), *logp.stride(),
        nodes.tokens, nodes.parents, nodes.scores, nodes.places,
        after.tokens, after.scores, after.nodes, after.rows, after.paths,
        T, first_node(K, level), level, K, W * K, FIRST=beam is None, LAST=last,
        PAD=pad, TILE=min(pad, COMPARED // pad), LEVELS=levels, CHUNK=min(levels, COMPARED // pad),
    )  # fmt: skip
    return None if last else after


def first_node(K: int, level: int) -> int:
    """Where the draws of a level begin."""
    return 1 if level == 1 else 1 + K + (level - 2) * K * K


def widen_twin(
    nodes: Nodes, root: Tensor, beam: Beam | None, picked: Tensor, logp: Tensor, level: int, *, last: bool
) -> Beam | None:
    """The same in torch operations."""
    B, W, K = picked.shape
    start, end, children = first_node(K, level), first_node(K, level + 1), picked.flatten(1)
    totals = nodes.scores[:, start:end]
    if beam is None:
        nodes.parents.zero_(), nodes.places.fill_(-1)
        nodes.tokens[:, 0] = root
        nodes.scores[:, 0].zero_()  # to assign a number would be a copy from the host
        totals.copy_(logp[:, 0])
    else:
        nodes.parents[:, start:end].view(B, W, K).copy_(beam.nodes[..., None])
        torch.add(beam.scores[..., None], logp, out=totals.view(B, W, K))
    totals.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    nodes.tokens[:, start:end] = children
    if last:
        return None
    if beam is None:  # all are expanded, in the order they were drawn in
        best, rows, scores = torch.arange(K, device=root.device).expand(B, K), torch.zeros_like(picked[:, 0]), totals
        paths = best[..., None]
    else:
        scores, best = (x[:, :K] for x in totals.sort(dim=1, descending=True, stable=True))
        rows = best // K
        paths = beam.paths.gather(1, rows[..., None].expand(-1, -1, level - 1))
        paths = torch.cat([paths, beam.paths[..., -1:] + K], dim=2)
    after = Beam(children.gather(1, best), scores, best + start, rows, paths)
    nodes.places.scatter_(1, after.nodes, paths[..., -1])
    return after


@jit
def _widen(  # type: ignore[no-untyped-def]
    ROOT, BEAM_SCORES, BEAM_NODES, BEAM_PATHS, PICKED, LOGP, p_b, p_w, p_k, l_b, l_w, l_k,
    TOKENS, PARENTS, SCORES, PLACES, NEXT_TOKENS, NEXT_SCORES, NEXT_NODES, NEXT_ROWS, NEXT_PATHS,
    T, first, level, K, C,
    FIRST: constexpr, LAST: constexpr, PAD: constexpr, TILE: constexpr, LEVELS: constexpr, CHUNK: constexpr,
):  # fmt: skip
    """One row: its C draws to their places; those with fewer than K better ones to the next beam."""
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
    """The scores of draws c; -inf for what is not a number, and behind the last."""
    total = tl.load(LOGP + c // K * l_w + c % K * l_k, mask=c < C, other=-float("inf"))
    if not FIRST:
        total = tl.load(SCORES + c // K, mask=c < C, other=0.0) + total
    return tl.where(total == total, total, -float("inf"))


def prune(nodes: Nodes, penalties: Tensor, count: int) -> Nodes:
    """The root and the `count` - 1 (N) best others by score less penalty (T,), in order, parents renumbered."""
    B, T = nodes.tokens.shape
    if nodes.scores.dtype != torch.float32 or T > MOST_NODES or not runs_kernels(nodes.scores):
        return prune_twin(nodes, penalties, count)
    tokens, parents, places, depths = nodes.tokens.new_empty(4, B, count)
    kept = Nodes(tokens, parents, nodes.scores.new_empty(B, count), places, depths)
    pad = next_power_of_2(T)
    _prune[(B,)](
        nodes.tokens, nodes.parents, nodes.scores, nodes.places, nodes.depths, penalties,
        kept.tokens, kept.parents, kept.scores, kept.places, kept.depths, T, count,
        BITS=4 if pad <= 1024 else 2, PAD=pad, num_warps=4 if pad <= 512 else 8,
    )  # fmt: skip
    return kept


def prune_twin(nodes: Nodes, penalties: Tensor, count: int) -> Nodes:
    """The same in torch operations."""
    rank = nodes.scores - penalties
    rank[:, 0].fill_(torch.inf)
    kept = rank.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values  # (B, N)
    order = torch.arange(count, device=kept.device).expand_as(kept)
    place = torch.zeros_like(nodes.parents).scatter_(1, kept, order)
    return Nodes(
        nodes.tokens.gather(1, kept),
        place.gather(1, nodes.parents.gather(1, kept)),
        nodes.scores.gather(1, kept),
        nodes.places.gather(1, kept),
        nodes.depths[kept],
    )


@jit
def _prune(  # type: ignore[no-untyped-def]
    TOKENS, PARENTS, SCORES, PLACES, DEPTHS, PENALTIES,
    KEPT_TOKENS, KEPT_PARENTS, KEPT_SCORES, KEPT_PLACES, KEPT_DEPTHS, T, N,
    BITS: constexpr, PAD: constexpr,
):  # fmt: skip
    """One row: the N-th best key, BITS by BITS from the highest; then whoever is better, and the first as good."""
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    real = i < T
    score = tl.load(SCORES + b * T + i, mask=real, other=0.0)
    rank = tl.where(i == 0, float("inf"), score - tl.load(PENALTIES + i, mask=real, other=0.0))
    bits = tl.where(rank == 0, 0.0, rank).to(tl.uint32, bitcast=True)  # of the two zeros, the positive
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)  # whole numbers in the order of the floats
    key = tl.where(real, key, 0)
    least, digit = tl.zeros([], tl.uint32), tl.arange(0, 1 << BITS).to(tl.uint32)
    for step in range(0, 32, BITS):
        trial = least | (digit << (32 - BITS - step))
        reached = tl.sum((key[:, None] >= trial[None]).to(tl.int32), 0) >= N  # by the lowest digits, if by any
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


@dataclass(frozen=True)
class Level:
    """A static tree's nodes of one depth, M of them, P of which are expanded."""

    first: int
    """The first of them; the others follow."""
    count: int
    """Children drawn for each node of the level above."""
    row: Tensor  # (M,) int64, each one's parent among the nodes expanded above
    rank: Tensor  # (M,) int64, which of its parent's children it is
    above: Tensor  # (M,) int64, its parent
    expanded: Tensor  # (P,) int64, which of the M are expanded
    rows: Tensor  # (P,) int64, their parents among the nodes expanded above
    paths: Tensor  # (P, the level) int64, the places of those above, and their own


def place(tokens: Tensor, scores: Tensor, root: Tensor, picked: Tensor, logp: Tensor, level: Level) -> Tensor:
    """Take in those of picked and logp (B, W, R) that are nodes of a level of a static tree; the root (B,) goes with
    the first. tokens and scores (B, N) are the tree's. Returns the tokens (B, P) of those that are expanded."""
    if not runs_kernels(logp):
        return place_twin(tokens, scores, root, picked, logp, level)
    (B, N), M, P = tokens.shape, len(level.row), len(level.expanded)
    beam = root.new_empty(B, P)
    _place[(B, triton.cdiv(M, PLACED))](
        root, picked, logp, *picked.stride(), *logp.stride(), level.row, level.rank, level.above, level.expanded,
        tokens, scores, beam, N, M, P, level.first, FIRST=level.first == 1, BLOCK=min(PLACED, next_power_of_2(M)),
    )  # fmt: skip
    return beam


def place_twin(tokens: Tensor, scores: Tensor, root: Tensor, picked: Tensor, logp: Tensor, level: Level) -> Tensor:
    """The same in torch operations."""
    if level.first == 1:
        tokens[:, 0] = root
        scores[:, 0].zero_()
    here, taken = slice(level.first, level.first + len(level.row)), picked[:, level.row, level.rank]
    tokens[:, here], scores[:, here] = taken, scores[:, level.above] + logp[:, level.row, level.rank]
    return taken[:, level.expanded]


@jit
def _place(  # type: ignore[no-untyped-def]
    ROOT, PICKED, LOGP, p_b, p_w, p_k, l_b, l_w, l_k, ROW, RANK, ABOVE, EXPANDED, TOKENS, SCORES, BEAM, N, M, P,
    first, FIRST: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Some nodes of a level of one row, and as many of those that are expanded."""
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
