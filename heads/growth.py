"""Growth of a draft tree below a root, with the ancestors of each node.

Dynamic trees are EAGLE-2's (arXiv 2406.16858, section 4). Each level expands the `top_k` nodes with the highest product
of the draft's probabilities along their path, and the `nodes` - 1 likeliest of all candidates are kept. Static trees
are Medusa's (arXiv 2401.10774, section 2.1.2): the nodes are fixed in advance, as ranks of children.

Letters: B batch, N nodes, W nodes expanded at one level, R children picked for each of them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from heads.backends.torch.select import TORCH, Level, Select, new_nodes
from heads.tree import Pick, Proposal, TreeShape, is_chain

DEPTH_PENALTY = 1e-4
"""Amount subtracted from a score for each level when nodes are ranked. It puts a parent before a child of draft
probability 1, whose logarithm may be rounded above 0."""

Draw = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(logits (B, W, Vd), level, R) -> R children's target ids and log-probabilities, (B, W, R), best first."""
Expand = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(tokens (B, W), parent rows (B, W) in the level before, paths (B, W, level), level) -> logits (B, W, Vd). A path
holds the indices of a node's ancestors, starting with the root's child, and ends with the node's own. Expanded nodes
are numbered from 0, level by level; the W nodes being expanded have the highest numbers."""


def grow(
    shape: TreeShape,
    root: Tensor,
    position: Tensor,
    logits: Tensor,
    pick: Pick,
    expand: Expand,
    token_ids: Tensor | None,
    select: Select = TORCH,
) -> Proposal:
    """Grow a tree below `root` (B,), which is at `position` (B,). `logits` (B, 1, Vd) are the draft's, of the token
    after the root. `pick` draws from logits whose columns are `token_ids` (Vd,); `select` is the backend's.

    Levels count from 1, the root's children. `expand` is called depth - 1 times, with static shapes.
    """

    ahead = position[:, None] + constant(tuple(range(shape.depth + 1)), position.device)  # (B, K + 1)

    def draw(logits: Tensor, level: int, count: int) -> tuple[Tensor, Tensor]:
        return pick(logits, ahead[:, level, None].expand(-1, logits.shape[1]), count, token_ids)

    grow_shape = _grow_static if shape.paths is not None else _grow_chain if is_chain(shape) else _grow_dynamic
    return grow_shape(shape, root, logits, draw, expand, select)


def _grow_chain(shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand, select: Select) -> Proposal:
    """Grow a tree of one node per level, without the operations that choose among several nodes."""
    B, K, device = len(root), shape.depth, root.device
    node = constant(tuple(range(K + 1)), device).expand(B, -1)
    tokens, steps, path = [root[:, None]], [constant((0.0,), device, torch.float32).expand(B, 1)], node[:, None]
    for level in range(1, K + 1):
        picked, logp = draw(logits, level, 1)  # (B, 1, 1)
        tokens.append(picked[:, 0])
        steps.append(logp[:, 0])
        if level < K:
            logits = expand(picked[:, 0], node[:, :1], path[..., :level], level)
    parents = constant((0, *range(K)), device).expand(B, -1)
    return Proposal(torch.cat(tokens, 1), parents, node, torch.cat(steps, 1).cumsum(1))


def _grow_dynamic(
    shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand, select: Select
) -> Proposal:
    B, K, device = len(root), shape.top_k, root.device
    depths, penalties = _levels(shape.depth, K, device)
    picked, logp = draw(logits, 1, K)  # (B, 1, K)
    nodes = new_nodes(root, depths, logp.dtype)
    beam = select.widen(nodes, root, None, picked, logp, 1, last=shape.depth == 1)
    for level in range(2, shape.depth + 1):
        assert beam is not None
        picked, logp = draw(expand(beam.tokens, beam.rows, beam.paths, level - 1), level, K)  # (B, K, K)
        beam = select.widen(nodes, root, beam, picked, logp, level, last=level == shape.depth)
    if shape.nodes < len(depths):
        nodes = select.prune(nodes, penalties, shape.nodes)
    else:
        nodes = replace(nodes, depths=depths.expand(B, -1))
    expanded = nodes.expanded if shape.depth > 1 else None
    return Proposal(nodes.tokens, nodes.parents, nodes.depths, nodes.scores, expanded)


@cache
def _levels(depth: int, K: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the depths (T,) int64 of all candidates of a dynamic tree, and the amounts (T,) float32 subtracted from
    their scores."""
    levels = (0, *[1] * K, *(level for level in range(2, depth + 1) for _ in range(K * K)))
    penalties = DEPTH_PENALTY * torch.tensor(levels)
    return constant(levels, device), constant(tuple(penalties.tolist()), device, torch.float32)


def _grow_static(
    shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand, select: Select
) -> Proposal:
    assert shape.paths is not None
    B = len(root)
    levels, parents, depths, indices = _plan(shape.paths, root.device)
    picked, logp = draw(logits, 1, levels[0].count)  # (B, 1, R)
    tokens, scores = root.new_empty(B, shape.nodes), logp.new_empty(B, shape.nodes)
    beam = select.place(tokens, scores, root, picked, logp, levels[0])  # (B, P)
    for k, (above, level) in enumerate(pairwise(levels), start=1):
        logits = expand(beam, above.rows.expand(B, -1), above.paths.expand(B, -1, -1), k)
        picked, logp = draw(logits, k + 1, level.count)  # (B, P, R)
        beam = select.place(tokens, scores, root, picked, logp, level)
    return Proposal(tokens, parents.expand(B, -1), depths.expand(B, -1), scores, indices.expand(B, -1))


@cache
def _plan(paths: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[list[Level], Tensor, Tensor, Tensor]:
    """Return the levels of a static tree, and the parents, depths and expansion indices of its nodes, (1, N) each."""
    node_of = {(): 0, **{path: 1 + i for i, path in enumerate(paths)}}
    has_children = {path[:-1] for path in paths}
    expanded: list[tuple[int, ...]] = [()]  # the nodes expanded at the level before
    order: list[tuple[int, ...]] = []  # all nodes given to `expand`, in order
    levels = []
    for depth in range(1, 1 + max(map(len, paths))):
        nodes = [path for path in paths if len(path) == depth]
        parents = [path for path in nodes if path in has_children]
        order += parents
        levels.append(
            Level(
                first=node_of[nodes[0]],
                count=1 + max(path[-1] for path in nodes),
                row=constant(tuple(expanded.index(path[:-1]) for path in nodes), device),
                rank=constant(tuple(path[-1] for path in nodes), device),
                above=constant(tuple(node_of[path[:-1]] for path in nodes), device),
                expanded=constant(tuple(nodes.index(path) for path in parents), device),
                rows=constant(tuple(expanded.index(path[:-1]) for path in parents), device),
                paths=constant(
                    tuple(tuple(order.index(path[: i + 1]) for i in range(depth)) for path in parents), device
                ),
            )
        )
        expanded = parents
    return (
        levels,
        constant(((0, *(node_of[path[:-1]] for path in paths)),), device),
        constant(((0, *map(len, paths)),), device),
        constant(((-1, *(order.index(path) if path in has_children else -1 for path in paths)),), device),
    )


@cache
def constant(values: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on a device, copied there only once, because a CUDA graph cannot capture a copy from
    the host."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
