"""Choosing the nodes of a draft tree, by torch's operations.

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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Nodes:
    """A tree's nodes, the root first, parents before children."""

    tokens: Tensor  # (B, T) int64
    parents: Tensor  # (B, T) int64
    scores: Tensor  # (B, T) float32 as a rule, log-probability of the path
    expanded: Tensor  # (B, T) int64, each one's index among the expanded; -1 where it is not
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
    tokens, parents, expanded = root.new_empty(3, B, T)
    return Nodes(tokens, parents, root.new_empty(B, T, dtype=dtype), expanded, depths)


@dataclass(frozen=True)
class Level:
    """A static tree's nodes of one depth: M of them, P expanded."""

    first: int
    """The first of them; the others follow."""
    count: int
    """Children drawn for each node of the level above."""
    row: Tensor  # (M,) int64, each one's parent among the nodes expanded above
    rank: Tensor  # (M,) int64, which of its parent's children it is
    above: Tensor  # (M,) int64, its parent
    expanded: Tensor  # (P,) int64, which of the M are expanded
    rows: Tensor  # (P,) int64, their parents among the nodes expanded above
    paths: Tensor  # (P, the level) int64, the indices of those above, and their own


def first_node(K: int, level: int) -> int:
    """Return the index of a level's first draw."""
    return 1 if level == 1 else 1 + K + (level - 2) * K * K


def widen(
    nodes: Nodes, root: Tensor, beam: Beam | None, picked: Tensor, logp: Tensor, level: int, *, last: bool
) -> Beam | None:
    """Take in picked and logp (B, W, K), the children of the beam's nodes and their log-probabilities, best first; of
    the root (B,), whose beam is None, at level 1. Returns the next beam, None at the last level."""
    B, W, K = picked.shape
    start, end, children = first_node(K, level), first_node(K, level + 1), picked.flatten(1)
    totals = nodes.scores[:, start:end]
    if beam is None:
        nodes.parents.zero_(), nodes.expanded.fill_(-1)
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
    nodes.expanded.scatter_(1, after.nodes, paths[..., -1])
    return after


def prune(nodes: Nodes, penalties: Tensor, count: int) -> Nodes:
    """The root and the `count` - 1 (N) best others by score less penalty (T,), in order, parents renumbered."""
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
    """Take in those of picked and logp (B, W, R) that are nodes of a level of a static tree; the root (B,) goes with
    the first. tokens and scores (B, N) are the tree's. Returns the tokens (B, P) of those that are expanded."""
    if level.first == 1:
        tokens[:, 0] = root
        scores[:, 0].zero_()
    here, taken = slice(level.first, level.first + len(level.row)), picked[:, level.row, level.rank]
    tokens[:, here], scores[:, here] = taken, scores[:, level.above] + logp[:, level.row, level.rank]
    return taken[:, level.expanded]


@dataclass(frozen=True)
class Select:
    """The forms of one backend."""

    widen: Callable[..., Beam | None] = widen
    prune: Callable[..., Nodes] = prune
    place: Callable[..., Tensor] = place


TORCH = Select()
