"""Draft trees: their shapes, how they grow, and which node sees which.

A tree is two integer tensors, `tokens` (B, N) and `parents` (B, N). Node 0 is the root, its own parent; every other
node stands behind its parent. Verification depends on nothing else, so any way of growing a tree is exact. A chain is
the tree whose parents are 0, 0, 1, 2, ...

Dynamic trees are EAGLE-2's (arXiv 2406.16858, section 4): each level expands the `top_k` likeliest nodes by the product
of the draft's probabilities along the path, and the `nodes` - 1 likeliest of all candidates are kept. Static trees are
Medusa's (arXiv 2401.10774, section 2.1.2): which children of which node, by rank, is fixed beforehand.

Letters: B batch, N nodes, W nodes expanded at one level, R children picked for each of them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from operator import mul
from typing import Any, Protocol

import torch
from torch import Tensor

from heads.errors import UserError

DEPTH_PENALTY = 1e-4
"""Taken from a score per level in the ranking, so that a parent stands before a child of draft probability 1."""

MOST_NODES = 1024
"""More would cost a target pass more than any draft can save."""


@dataclass(frozen=True)
class TreeShape:
    """What is drafted in a round; `parse_shape` reads it from text."""

    depth: int
    """Levels below the root; the most tokens a round can accept."""
    top_k: int
    """Children picked for each expanded node, and nodes expanded a level."""
    nodes: int
    """Nodes verified in a round, the root included."""
    paths: tuple[tuple[int, ...], ...] | None = None
    """A static tree: each node but the root as the ranks of the children on its path; None in a dynamic one."""
    text: str = ""

    def __str__(self) -> str:
        return self.text


ROOT_ONLY = TreeShape(depth=0, top_k=0, nodes=1, text="none")
"""Plain decoding: nothing is drafted."""


@dataclass(frozen=True)
class Proposal:
    """A draft tree for each row of the batch."""

    tokens: Tensor  # (B, N) int64, target ids; node 0 is the root
    parents: Tensor  # (B, N) int64; parents[:, 0] = 0, parents[:, j] < j
    depths: Tensor  # (B, N) int64; 0 for the root
    scores: Tensor  # (B, N) float32, log-probability of the path by the draft's reckoning; 0 for the root
    expanded: Tensor | None = None
    """(B, N) int64: the place of each node among those that `grow` expanded, in order; -1 where it was not, and for the
    root. None for a chain, where node j is the j-th but for the last."""


def parse_shape(text: str) -> TreeShape:
    """`none`, `chain:5`, `tree:DEPTHxTOP_KxNODES` (dynamic) or `static:3.2.1` (children of a node, level by level)."""
    if text == "none":
        return ROOT_ONLY
    if match := re.fullmatch(r"chain:(\d+)", text):
        depth = int(match[1])
        if depth >= 1:
            _check_size(text, depth + 1)
            return TreeShape(depth=depth, top_k=1, nodes=depth + 1, text=text)
    elif match := re.fullmatch(r"tree:(\d+)x(\d+)x(\d+)", text):
        depth, top_k, nodes = map(int, match.groups())
        if depth >= 1 and top_k >= 1 and nodes >= 2:
            _check_size(text, nodes)
            most = 1 + top_k + (depth - 1) * top_k**2
            if nodes > most:
                raise UserError(f"tree {text!r}: {depth} levels of {top_k} give at most {most} nodes; ask for no more")
            return TreeShape(depth=depth, top_k=top_k, nodes=nodes, text=text)
    elif match := re.fullmatch(r"static:(\d+(?:\.\d+)*)", text):
        branching = [int(part) for part in match[1].split(".")]
        if min(branching) >= 1:
            _check_size(text, 1 + sum(accumulate(branching, mul)))
            levels = [product(*map(range, branching[: i + 1])) for i in range(len(branching))]
            return static_shape([path for level in levels for path in level], text)
    raise UserError(
        f"tree {text!r}: expected none, chain:K, tree:DEPTHxTOP_KxNODES or static:B1.B2..., "
        "such as chain:5, tree:5x8x32 or static:3.2.1"
    )


def _check_size(text: str, nodes: int) -> None:
    if nodes > MOST_NODES:
        raise UserError(f"tree {text!r}: {nodes} nodes are more than a round verifies; ask for at most {MOST_NODES}")


def static_shape(paths: Sequence[tuple[int, ...]], text: str) -> TreeShape:
    """A static tree from its nodes' rank paths (Medusa's `choices`); every prefix of a path must be a path."""
    ordered = tuple(sorted(set(paths), key=lambda path: (len(path), path)))
    for path in ordered:
        if len(path) > 1 and path[:-1] not in ordered:
            raise UserError(f"static tree: node {path} stands without its parent {path[:-1]}; add it")
    top_k = 1 + max(max(path) for path in ordered)
    return TreeShape(depth=len(ordered[-1]), top_k=top_k, nodes=1 + len(ordered), paths=ordered, text=text)


def is_chain(shape: TreeShape) -> bool:
    """Whether each node is the only child of the one before it: no masks of ancestors, and accepted keys already in
    place."""
    return shape.nodes == shape.depth + 1 and shape.top_k <= 1


def ancestors(parents: Tensor, depth: int) -> Tensor:
    """(B, N, N) bool: [b, i, j] is True where node j is node i or stands above it; trees of at most `depth` levels."""
    B, N = parents.shape
    above = torch.eye(N, dtype=torch.bool, device=parents.device).repeat(B, 1, 1)
    node = torch.arange(N, device=parents.device).expand(B, N)
    for _ in range(depth):
        node = parents.gather(1, node)
        above.scatter_(2, node[..., None], True)
    return above


class Pick(Protocol):
    """How children are drawn from the draft's law: by the runtime, whose acceptance rule must know how they were."""

    def __call__(
        self, logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`count` (R) children of each of W nodes, best first.

        logits (B, W, Vx); positions (B, W) of the tokens to be drawn; token_ids (Vx,) the target ids of the columns,
        None where they are 0 .. Vx - 1. Returns target ids (B, W, R) and log-probabilities by which trees rank them.
        """


class CompiledPick:
    """A `Pick` on the CPU that C may call, too:

    void function(const void *context, const float *logits, const int64_t *positions, const int64_t *token_ids,
                  int64_t *picked, float *logp, int64_t B, int64_t W, int64_t Vx, int64_t count)
    """

    function: int
    context: int

    def __call__(
        self, logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `Pick`."""
        raise NotImplementedError


Draw = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(logits (B, W, Vd), level, R) -> R children's target ids and log-probabilities, (B, W, R), best first."""
Expand = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(tokens (B, W), parent rows (B, W) in the level before, paths (B, W, level), level) -> logits (B, W, Vd). A path
holds the places of a node's ancestors, the root's child first, and its own last: nodes expanded so far are numbered
from 0, level by level, and the W that are being expanded come last."""


def grow(
    shape: TreeShape,
    root: Tensor,
    position: Tensor,
    logits: Tensor,
    pick: Pick,
    expand: Expand,
    token_ids: Tensor | None,
) -> Proposal:
    """Grow a tree below `root` (B,), which stands at `position` (B,), from `logits` (B, 1, Vd), the draft's law of the
    root's child. `pick` draws from logits whose columns are `token_ids` (Vd,).

    Levels count from 1, the root's children. `expand` is called depth - 1 times, with static shapes.
    """

    def draw(logits: Tensor, level: int, count: int) -> tuple[Tensor, Tensor]:
        return pick(logits, (position + level)[:, None].expand(-1, logits.shape[1]), count, token_ids)

    grow_shape = _grow_static if shape.paths is not None else _grow_chain if is_chain(shape) else _grow_dynamic
    return grow_shape(shape, root, logits, draw, expand)


def _grow_chain(shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand) -> Proposal:
    """A dynamic tree of one node a level, without the operations that choose among several."""
    B, K, device = len(root), shape.depth, root.device
    row, path = root.new_zeros(B, 1), torch.arange(K, device=device).expand(B, 1, K)
    tokens, steps = [root[:, None]], []
    for level in range(1, K + 1):
        picked, logp = draw(logits, level, 1)  # (B, 1, 1)
        tokens.append(picked[:, 0])
        steps.append(logp[:, 0])
        if level < K:
            logits = expand(picked[:, 0], row, path[..., :level], level)
    node = torch.arange(K + 1, device=device).expand(B, -1)
    scores = torch.nn.functional.pad(torch.cat(steps, 1).cumsum(1), (1, 0))
    return Proposal(torch.cat(tokens, 1), (node - 1).clamp_min(0), node, scores)


def _grow_dynamic(shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand) -> Proposal:
    B, K = len(root), shape.top_k
    device = root.device
    picked, logp = draw(logits, 1, K)
    tokens, scores = [root[:, None], picked[:, 0]], [logp.new_zeros(B, 1), logp[:, 0]]
    parents = [torch.zeros(B, 1 + K, dtype=torch.int64, device=device)]
    beam_tokens, beam_scores = picked[:, 0], logp[:, 0]  # (B, K) each
    beam_nodes = torch.arange(1, 1 + K, device=device).expand(B, K)
    rows = torch.zeros(B, K, dtype=torch.int64, device=device)
    own = torch.arange(K, device=device).expand(B, K)[..., None]  # places among the level's
    paths, expansions = own, [beam_nodes]
    for level in range(2, shape.depth + 1):
        picked, logp = draw(expand(beam_tokens, rows, paths, level - 1), level, K)  # (B, K, K)
        candidates, totals = picked.flatten(1), (beam_scores[..., None] + logp).flatten(1)  # (B, K * K)
        base = 1 + K + (level - 2) * K * K
        tokens.append(candidates)
        scores.append(totals)
        parents.append(beam_nodes.repeat_interleave(K, dim=1))
        if level < shape.depth:
            beam_scores, best = totals.topk(K, dim=1)
            beam_tokens, beam_nodes, rows = candidates.gather(1, best), base + best, best // K
            above = paths.gather(1, rows[..., None].expand(-1, -1, level - 1))
            paths = torch.cat([above, own + (level - 1) * K], dim=2)  # (B, K, level)
            expansions.append(beam_nodes)
    all_tokens, all_scores, all_parents = torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1)
    widths = [1, K, *[K * K] * (shape.depth - 1)]
    depths = torch.repeat_interleave(
        torch.arange(len(widths), device=device), constant(tuple(widths), device), output_size=sum(widths)
    )
    depths = depths.expand(B, -1)
    places = torch.full_like(all_parents, -1) if shape.depth > 1 else None
    if places is not None:
        order = torch.cat(expansions, dim=1)  # (B, nodes expanded)
        places.scatter_(1, order, torch.arange(order.shape[1], device=device).expand(B, -1))
    if shape.nodes == all_tokens.shape[1]:
        return Proposal(all_tokens, all_parents, depths, all_scores, places)
    # Ids ascend by level, so a sorted selection keeps every parent before its children; and a parent is never left out
    # when its child is kept, because its rank is strictly better.
    rank = all_scores - DEPTH_PENALTY * depths
    rank[:, 0].fill_(torch.inf)
    kept = rank.topk(shape.nodes, dim=1).indices.sort(dim=1).values  # (B, N)
    place = torch.zeros_like(all_parents).scatter(1, kept, torch.arange(shape.nodes, device=device).expand(B, -1))
    return Proposal(
        all_tokens.gather(1, kept),
        place.gather(1, all_parents.gather(1, kept)),
        depths.gather(1, kept),
        all_scores.gather(1, kept),
        None if places is None else places.gather(1, kept),
    )


def _grow_static(shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand) -> Proposal:
    assert shape.paths is not None
    B = len(root)
    levels, parents, depths, places = _plan(shape.paths, root.device)
    tokens, scores = root[:, None], logits.new_zeros(B, 1, dtype=torch.float32)  # (B, nodes so far)
    for k, level in enumerate(levels, start=1):
        picked, logp = draw(logits, k, level.count)  # (B, W, R)
        tokens = torch.cat([tokens, picked[:, level.row, level.rank]], dim=1)
        scores = torch.cat([scores, scores[:, level.above] + logp[:, level.row, level.rank]], dim=1)
        if k < len(levels):
            logits = expand(
                tokens[:, level.parents], level.row_of_parents.expand(B, -1), level.paths.expand(B, -1, -1), k
            )
    return Proposal(tokens, parents.expand(B, -1), depths.expand(B, -1), scores, places.expand(B, -1))


@dataclass(frozen=True)
class _Level:
    """A static tree's nodes of one depth, W of them, P of which are expanded."""

    count: int
    """Children picked for each node of the level above."""
    row: Tensor  # (W,) int64, each one's parent among the nodes expanded above
    rank: Tensor  # (W,) int64, which of its parent's children it is
    above: Tensor  # (W,) int64, its parent
    parents: Tensor  # (P,) int64, the nodes to expand
    row_of_parents: Tensor  # (P,) int64, their parents among the nodes expanded above
    paths: Tensor  # (P, the level) int64, the places of those above, and their own


@cache
def _plan(paths: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[list[_Level], Tensor, Tensor, Tensor]:
    """A static tree's levels; its nodes' parents, depths, and places among those expanded; (1, N) each."""
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
            _Level(
                count=1 + max(path[-1] for path in nodes),
                row=constant(tuple(expanded.index(path[:-1]) for path in nodes), device),
                rank=constant(tuple(path[-1] for path in nodes), device),
                above=constant(tuple(node_of[path[:-1]] for path in nodes), device),
                parents=constant(tuple(node_of[path] for path in parents), device),
                row_of_parents=constant(tuple(expanded.index(path[:-1]) for path in parents), device),
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
def constant(values: tuple[Any, ...], device: torch.device) -> Tensor:
    """Numbers as a tensor on a device, sent there once: a CUDA graph cannot hold a copy from the host."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def scratch_slots(shape: TreeShape) -> int:
    """How many nodes `grow` expands in all: the draft-cache slots one round needs below the root."""
    if shape.paths is None:
        return max(shape.depth - 1, 0) * shape.top_k
    parents = {path[:-1] for path in shape.paths if len(path) > 1}
    return len(parents)
