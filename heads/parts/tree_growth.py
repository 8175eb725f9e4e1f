"""Growth of a draft tree below a root, with the ancestors of each node.

Dynamic trees are EAGLE-2's (arXiv 2406.16858, section 4). Each level expands the `top_k` nodes with the highest product
of the draft's probabilities along their path, and the `nodes` - 1 likeliest of all candidates are kept. Static trees
are Medusa's (arXiv 2401.10774, section 2.1.2): the nodes are fixed in advance, as ranks of children.

Nodes are ranked by score, then by lowest index. A parent's score is never below its child's, and its index is lower, so
a parent is never dropped before its child. This includes scores that are both -inf, a child of draft probability 1, and
sums of logarithms so large that the depth penalty is lost in rounding. NaN log-probabilities count as -inf, so that
they cannot displace the root.

Letters: B batch, T nodes drawn including the root, N nodes of the tree, K children drawn per node and nodes expanded
per level of a dynamic tree, W nodes expanded at the level before, R children drawn for each, M nodes of a level of a
static tree, P of them expanded.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

from heads.core.tree import Pick, Proposal, TreeShape, is_chain

DEPTH_PENALTY = 1e-4
"""Amount subtracted from a score for each level when nodes are ranked. It puts a parent before a child of draft
probability 1, whose logarithm may be rounded above 0."""

Draw = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(logits (B, W, Vd), level, R) -> R children's target ids and log-probabilities, (B, W, R), best first."""
Expand = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(tokens (B, W), parent rows (B, W) in the level before, paths (B, W, level), level) -> logits (B, W, Vd). A path
holds the indices of a node's ancestors, starting with the root's child, and ends with the node's own. Expanded nodes
are numbered from 0, level by level; the W nodes being expanded have the highest numbers."""


@dataclass(frozen=True)
class Level:
    """A static tree's nodes of one depth: M of them, P expanded."""

    count: int
    """Children drawn for each node that the level above expands."""
    row: Tensor  # (M,) int64, index of each node's parent among the nodes expanded at the level above
    rank: Tensor  # (M,) int64, rank of each node among its parent's children
    expanded: Tensor  # (P,) int64, which of the M nodes are expanded
    expanded_row: Tensor  # (P,) int64, their entries of `row`
    paths: Tensor  # (P, level) int64, the expanded indices of their ancestors and their own


@dataclass(frozen=True)
class StaticTree:
    """A static tree's levels, and properties of its nodes, (1, N) int64 each."""

    levels: list[Level]
    parents: Tensor
    depths: Tensor
    expanded: Tensor
    """`Proposal.expanded`."""


def grow(
    shape: TreeShape,
    root: Tensor,
    position: Tensor,
    logits: Tensor,
    pick: Pick,
    expand: Expand,
    token_ids: Tensor | None,
) -> Proposal:
    """Grow a tree below `root` (B,), which is at `position` (B,). `logits` (B, 1, Vd) are the draft's, of the token
    after the root. `pick` draws from logits whose columns are `token_ids` (Vd,).

    Levels count from 1, the root's children. `expand` is called depth - 1 times, with static shapes.
    """

    ahead = position[:, None] + constant(tuple(range(shape.depth + 1)), position.device)  # (B, K + 1)

    def draw(logits: Tensor, level: int, count: int) -> tuple[Tensor, Tensor]:
        return pick(logits, ahead[:, level, None].expand(-1, logits.shape[1]), count, token_ids)

    grow_tree = _grow_static if shape.paths is not None else _grow_chain if is_chain(shape) else _grow_dynamic
    return grow_tree(shape, root, logits, draw, expand)


def _grow_chain(shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand) -> Proposal:
    """Grow a tree of one node per level, without the operations that choose among several nodes."""
    B = len(root)
    K = shape.depth
    device = root.device
    node = constant(tuple(range(K + 1)), device).expand(B, -1)
    path = node[:, None]
    tokens = [root[:, None]]
    steps = [constant((0.0,), device, torch.float32).expand(B, 1)]
    for level in range(1, K + 1):
        picked, logp = (part[:, 0] for part in draw(logits, level, 1))  # (B, 1)
        tokens.append(picked)
        steps.append(logp)
        if level < K:
            logits = expand(picked, node[:, :1], path[..., :level], level)
    parents = constant((0, *range(K)), device).expand(B, -1)
    return Proposal(torch.cat(tokens, 1), parents, node, torch.cat(steps, 1).cumsum(1))


def _grow_dynamic(shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand) -> Proposal:
    B = len(root)
    K = shape.top_k
    N = shape.nodes
    device = root.device
    depths, penalties = _levels(shape.depth, K, device)
    T = len(depths)
    order = constant(tuple(range(T)), device).expand(B, -1)
    # The beam: the K nodes that are expanded next. Of the root's children these are all, in the order drawn.
    picked, logp = draw(logits, 1, K)  # (B, 1, K)
    beam = picked[:, 0]
    beam_scores = _ranked(logp[:, 0])
    nodes = order[:, 1 : 1 + K]  # their indices among all candidates
    rows = torch.zeros_like(nodes)
    paths = order[:, :K, None]
    tokens = [root[:, None], beam]
    scores = [torch.zeros_like(beam_scores[:, :1]), beam_scores]
    parents = [torch.zeros_like(order[:, : 1 + K])]
    beams = []
    for level in range(2, shape.depth + 1):
        beams.append(nodes)
        picked, logp = draw(expand(beam, rows, paths, level - 1), level, K)  # (B, K, K)
        tokens.append(picked.flatten(1))
        scores.append(_ranked((beam_scores[..., None] + logp).flatten(1)))
        parents.append(nodes[..., None].expand(-1, -1, K).flatten(1))
        if level < shape.depth:
            beam_scores, best = (x[:, :K] for x in scores[-1].sort(dim=1, descending=True, stable=True))
            beam = tokens[-1].gather(1, best)
            nodes = best + (1 + K + (level - 2) * K * K)
            rows = best // K
            to_parent = paths.gather(1, rows[..., None].expand(-1, -1, level - 1))
            paths = torch.cat([to_parent, paths[..., -1:] + K], dim=2)
    proposal = Proposal(torch.cat(tokens, 1), torch.cat(parents, 1), depths.expand(B, -1), torch.cat(scores, 1))
    if beams:
        expanded = torch.full_like(proposal.parents, -1)
        expanded.scatter_(1, torch.cat(beams, 1), order[:, : K * len(beams)])
        proposal = replace(proposal, expanded=expanded)
    if N == T:
        return proposal
    rank = proposal.scores - penalties
    rank[:, 0].fill_(torch.inf)
    best = rank.sort(dim=1, descending=True, stable=True).indices[:, :N].sort(dim=1).values  # (B, N)
    new_index = torch.zeros_like(proposal.parents).scatter_(1, best, order[:, :N])
    return Proposal(
        proposal.tokens.gather(1, best),
        new_index.gather(1, proposal.parents.gather(1, best)),
        proposal.depths.gather(1, best),
        proposal.scores.gather(1, best),
        None if proposal.expanded is None else proposal.expanded.gather(1, best),
    )


def _ranked(scores: Tensor) -> Tensor:
    """Return scores with -inf in place of NaN."""
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


@cache
def _levels(depth: int, K: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the depths (T,) int64 of all candidates of a dynamic tree, and the amounts (T,) float32 subtracted from
    their scores."""
    levels = (0, *[1] * K, *(level for level in range(2, depth + 1) for _ in range(K * K)))
    penalties = DEPTH_PENALTY * torch.tensor(levels)
    return constant(levels, device), constant(tuple(penalties.tolist()), device, torch.float32)


def _grow_static(shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand) -> Proposal:
    assert shape.paths is not None
    B = len(root)
    tree = _static_tree(shape.paths, root.device)
    tokens = [root[:, None]]
    scores = [constant((0.0,), root.device, torch.float32).expand(B, 1)]
    beam = scores[0]  # scores of the nodes expanded at the level above
    for depth, level in enumerate(tree.levels, 1):
        picked, logp = (x[:, level.row, level.rank] for x in draw(logits, depth, level.count))  # (B, M)
        tokens.append(picked)
        scores.append(beam[:, level.row] + logp)
        if depth < len(tree.levels):
            beam = scores[-1][:, level.expanded]
            rows = level.expanded_row.expand(B, -1)
            paths = level.paths.expand(B, -1, -1)
            logits = expand(picked[:, level.expanded], rows, paths, depth)
    parents, depths, expanded = (x.expand(B, -1) for x in (tree.parents, tree.depths, tree.expanded))
    return Proposal(torch.cat(tokens, 1), parents, depths, torch.cat(scores, 1), expanded)


@cache
def _static_tree(paths: tuple[tuple[int, ...], ...], device: torch.device) -> StaticTree:
    has_children = {path[:-1] for path in paths}
    order = [path for path in paths if path in has_children]  # the nodes given to `expand`; paths are sorted by level
    levels = []
    above: list[tuple[int, ...]] = [()]  # the nodes expanded at the level above

    def tensor(values: list[int], *shape: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.tensor(values, dtype=torch.int64, device=device).view(shape)

    for depth, of_depth in groupby(paths, len):
        nodes = list(of_depth)
        expanded = [path for path in nodes if path in has_children]
        above_expanded = [order.index(path[:i]) for path in expanded for i in range(1, depth + 1)]
        levels.append(
            Level(
                count=1 + max(path[-1] for path in nodes),
                row=tensor([above.index(path[:-1]) for path in nodes], -1),
                rank=tensor([path[-1] for path in nodes], -1),
                expanded=tensor([nodes.index(path) for path in expanded], -1),
                expanded_row=tensor([above.index(path[:-1]) for path in expanded], -1),
                paths=tensor(above_expanded, -1, depth),
            )
        )
        above = expanded
    node_of = {path: i for i, path in enumerate(((), *paths))}
    return StaticTree(
        levels,
        parents=tensor([0, *(node_of[path[:-1]] for path in paths)], 1, -1),
        depths=tensor([0, *map(len, paths)], 1, -1),
        expanded=tensor([-1, *(order.index(path) if path in has_children else -1 for path in paths)], 1, -1),
    )


@cache
def constant(values: tuple[object, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on a device, copied there only once, because a CUDA graph cannot capture a copy from
    the host."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
