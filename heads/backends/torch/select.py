"""Choice of a draft tree's nodes, with torch operations.

A dynamic tree (EAGLE-2, arXiv 2406.16858, section 4) draws K children of each of the K likeliest nodes of a level, and
keeps the N likeliest of all drawn nodes. `widen` adds a level's draws and finds the next nodes to expand. `prune` keeps
the best nodes. A static tree's draws are fixed beforehand: `place` adds them.

Nodes are ranked by score, then by lowest index. A parent's score is never below its child's, and its index is lower, so
a parent is never dropped before its child. This includes scores that are both -inf, a child of draft probability 1, and
sums of logarithms so large that the depth penalty is lost in rounding. NaN log-probabilities count as -inf, so that
they cannot displace the root.

Letters: B rows of the batch, T nodes drawn including the root, N nodes kept, K children drawn per node and nodes
expanded per level, W nodes expanded at the previous level (1 or K), R children drawn for each, M nodes placed at a
level of a static tree, P of them expanded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Nodes:
    """A tree's nodes, the root first, parents before children."""

    tokens: Tensor  # (B, T) int64
    parents: Tensor  # (B, T) int64
    scores: Tensor  # (B, T) usually float32, log-probability of the path
    expanded: Tensor  # (B, T) int64, the node's index among the expanded nodes; -1 if it is not expanded
    depths: Tensor  # (T,) int64 while a tree grows, (B, N) after `prune`


@dataclass(frozen=True)
class Beam:
    """The W nodes expanded at one level. `heads.growth.Expand` describes rows and paths."""

    tokens: Tensor  # (B, W) int64
    scores: Tensor  # (B, W) float32
    nodes: Tensor  # (B, W) int64
    rows: Tensor  # (B, W) int64
    paths: Tensor  # (B, W, level) int64


def new_nodes(root: Tensor, depths: Tensor, dtype: torch.dtype = torch.float32) -> Nodes:
    """Return empty nodes of the given depths (T,) for root (B,), with scores of type `dtype`. Nodes not yet drawn are
    padding."""
    B, T = len(root), len(depths)
    tokens, parents, expanded = root.new_empty(3, B, T)
    return Nodes(tokens, parents, root.new_empty(B, T, dtype=dtype), expanded, depths)


@dataclass(frozen=True)
class Level:
    """A static tree's nodes of one depth: M of them, P expanded."""

    first: int
    """Index of the level's first node. Its other nodes follow."""
    count: int
    """Children drawn for each node of the level above."""
    row: Tensor  # (M,) int64, index of each node's parent among the nodes expanded at the previous level
    rank: Tensor  # (M,) int64, rank of each node among its parent's children
    above: Tensor  # (M,) int64, each node's parent
    expanded: Tensor  # (P,) int64, which of the M nodes are expanded
    rows: Tensor  # (P,) int64, indices of their parents among the nodes expanded at the previous level
    paths: Tensor  # (P, level) int64, the expanded indices of their ancestors and their own


def first_node(K: int, level: int) -> int:
    """Return the index of a level's first draw."""
    return 1 if level == 1 else 1 + K + (level - 2) * K * K


def widen(
    nodes: Nodes, root: Tensor, beam: Beam | None, picked: Tensor, logp: Tensor, level: int, *, last: bool
) -> Beam | None:
    """Add picked and logp (B, W, K), the children of the beam's nodes and their log-probabilities, best first. At level
    1, beam is None and the children are the root's (B,). Return the next beam, None at the last level."""
    B, W, K = picked.shape
    start, end, children = first_node(K, level), first_node(K, level + 1), picked.flatten(1)
    totals = nodes.scores[:, start:end]
    if beam is None:
        nodes.parents.zero_(), nodes.expanded.fill_(-1)
        nodes.tokens[:, 0] = root
        nodes.scores[:, 0].zero_()  # assigning a number would copy it from the host
        totals.copy_(logp[:, 0])
    else:
        nodes.parents[:, start:end].view(B, W, K).copy_(beam.nodes[..., None])
        torch.add(beam.scores[..., None], logp, out=totals.view(B, W, K))
    totals.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    nodes.tokens[:, start:end] = children
    if last:
        return None
    if beam is None:  # all are expanded, in the order in which they were drawn
        best, rows, scores = torch.arange(K, device=root.device).expand(B, K), torch.zeros_like(picked[:, 0]), totals
        paths = best[..., None]
    else:
        scores, best = (x[:, :K] for x in totals.sort(dim=1, descending=True, stable=True))
        rows = best // K
        paths = beam.paths.gather(1, rows[..., None].expand(-1, -1, level - 1))
        paths = torch.cat([paths, beam.paths[..., -1:] + K], dim=2)
    after = Beam(children.gather(1, best), scores, best + start, rows, paths)
    nodes.expanded.scatter_(1, after.nodes, paths[..., -1])
    return after


def prune(nodes: Nodes, penalties: Tensor, count: int) -> Nodes:
    """Return the root and the `count` (N) - 1 other nodes with the best score - penalty (T,), in order, with parents
    renumbered."""
    rank = nodes.scores - penalties
    rank[:, 0].fill_(torch.inf)
    kept = rank.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values  # (B, N)
    order = torch.arange(count, device=kept.device).expand_as(kept)
    place = torch.zeros_like(nodes.parents).scatter_(1, kept, order)
    return Nodes(
        nodes.tokens.gather(1, kept),
        place.gather(1, nodes.parents.gather(1, kept)),
        nodes.scores.gather(1, kept),
        nodes.expanded.gather(1, kept),
        nodes.depths[kept],
    )


def place(tokens: Tensor, scores: Tensor, root: Tensor, picked: Tensor, logp: Tensor, level: Level) -> Tensor:
    """Write the entries of picked and logp (B, W, R) that are nodes of a static tree's level to the tree's tokens and
    scores (B, N); at the first level also the root (B,). Return the tokens (B, P) of the expanded nodes."""
    if level.first == 1:
        tokens[:, 0] = root
        scores[:, 0].zero_()
    here, taken = slice(level.first, level.first + len(level.row)), picked[:, level.row, level.rank]
    tokens[:, here], scores[:, here] = taken, scores[:, level.above] + logp[:, level.row, level.rank]
    return taken[:, level.expanded]


@dataclass(frozen=True)
class Select:
    """Functions of one backend that choose a tree's nodes."""

    widen: Callable[..., Beam | None] = widen
    prune: Callable[..., Nodes] = prune
    place: Callable[..., Tensor] = place


TORCH = Select()
