"""Draft trees: their shapes, parsed from text, and their tensors.

A tree is two integer tensors, `tokens` (B, N) and `parents` (B, N). Node 0 is the root, which is its own parent. Every
other node has a higher index than its parent. Verification depends on nothing else, so any way of growing a tree
(`heads.parts.tree_growth`) is exact. A chain is the tree whose parents are 0, 0, 1, 2, ...

The command line parses shapes, so this file does not import torch.

Letters: B batch, N nodes, W nodes expanded at one level, R children picked for each of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import mul
from typing import TYPE_CHECKING, Protocol

from heads.core.errors import UserError, shown

if TYPE_CHECKING:
    from torch import Tensor

MAX_NODES = 1024
"""Maximum number of nodes. With more, a target pass costs more than any draft can save."""


@dataclass(frozen=True)
class TreeShape:
    """Shape of a round's draft; `parse_shape` reads it from text."""

    depth: int
    """Number of levels below the root: the maximum number of draft tokens that a round can accept."""
    top_k: int
    """Number of children picked for each expanded node, and number of nodes expanded in a level."""
    nodes: int
    """Number of nodes verified in a round, root included."""
    paths: tuple[tuple[int, ...], ...] | None = None
    """Nodes of a static tree except the root, each as the ranks of the children on its path; None for a dynamic
    tree."""
    text: str = ""

    def __str__(self) -> str:
        return self.text


ROOT_ONLY = TreeShape(depth=0, top_k=0, nodes=1, text="none")
"""Shape of plain decoding, without a draft."""


@dataclass(frozen=True)
class Proposal:
    """A draft tree for each row of the batch."""

    tokens: Tensor  # (B, N) int64, target ids; node 0 is the root
    parents: Tensor  # (B, N) int64; parents[:, 0] = 0, parents[:, j] < j
    depths: Tensor  # (B, N) int64; 0 for the root
    scores: Tensor  # (B, N) float32, sum of `Pick`'s log-probabilities along the path; 0 for the root
    expanded: Tensor | None = None
    """(B, N) int64: index of each node among those that `grow` expanded, in order; -1 for the root and for nodes that
    were not expanded. None for a chain, where node j has the index j - 1 and the last node is not expanded."""
    copied: Tensor | None = None
    """(B,) bool: True for rows whose tokens were copied from the text, not drawn: each has probability 1 in q. None: no
    row."""

    def first(self, count: int) -> Proposal:
        """Return the first nodes of a chain, or a whole tree with that number of nodes."""
        if self.tokens.shape[1] <= count:
            return self
        tokens, parents, depths, scores = (x[:, :count] for x in (self.tokens, self.parents, self.depths, self.scores))
        return replace(self, tokens=tokens, parents=parents, depths=depths, scores=scores)


@dataclass(frozen=True)
class Acceptance:
    """Result of a round for each row. Entries after a row's last one are padding."""

    accepted: Tensor  # (B,) int64, n: number of draft tokens accepted, 0 <= n <= K
    path: Tensor  # (B, K + 1) int64, the nodes of the accepted path, root first; entries 0 .. n are valid
    emitted: Tensor  # (B, K + 1) int64, the accepted tokens, then the bonus token; entries 0 .. n are valid


def parse_shape(text: str) -> TreeShape:
    """Parse `none`, `chain:5`, `tree:DEPTHxTOP_KxNODES` (dynamic) or `static:3.2.1` (children of a node, level by
    level)."""
    if text == "none":
        return ROOT_ONLY
    if match := re.fullmatch(r"chain:(\d{1,9})", text):
        depth = int(match[1])
        if depth < 1:
            raise UserError(f"tree {text!r}: a chain has at least 1 draft token, such as chain:1 or chain:5")
        _check_size(text, depth + 1)
        return TreeShape(depth=depth, top_k=1, nodes=depth + 1, text=text)
    elif match := re.fullmatch(r"tree:(\d{1,9})x(\d{1,9})x(\d{1,9})", text):
        depth, top_k, nodes = map(int, match.groups())
        if depth >= 1 and top_k >= 1 and nodes >= 2:
            _check_size(text, nodes)
            most = 1 + top_k + (depth - 1) * top_k**2
            if nodes > most:
                raise UserError(f"tree {text!r}: {depth} levels of {top_k} give at most {most} nodes; ask for no more")
            return TreeShape(depth=depth, top_k=top_k, nodes=nodes, text=text)
    elif match := re.fullmatch(r"static:(\d{1,9}(?:\.\d{1,9})*)", text):
        branching = [int(part) for part in match[1].split(".")]
        if min(branching) >= 1:
            _check_size(text, 1 + sum(accumulate(branching, mul)))
            levels = [product(*map(range, branching[: i + 1])) for i in range(len(branching))]
            return static_shape([path for level in levels for path in level], text)
    raise UserError(
        f"tree {shown(text)}: expected chain:K, tree:DEPTHxTOP_KxNODES or static:B1.B2..., "
        "such as chain:5, tree:5x8x32 or static:3.2.1"
    )


def _check_size(text: str, nodes: int) -> None:
    if nodes > MAX_NODES:
        what = f"{nodes} nodes are more than a round verifies; ask for at most {MAX_NODES}"
        raise UserError(f"tree {shown(text)}: {what}")


def check_width(shape: TreeShape, known: int) -> None:
    """Raise UserError if a node has more children than the draft has tokens to choose from."""
    if shape.top_k > known:
        raise UserError(
            f"tree {shape}: {shape.top_k} children of a node, the head drafts {known} tokens; ask for fewer"
        )


def static_shape(paths: Sequence[tuple[int, ...]], text: str) -> TreeShape:
    """Return a static tree with the given rank paths of its nodes (Medusa's `choices`). Every prefix of a path must be
    a path."""
    ordered = tuple(sorted(set(paths), key=lambda path: (len(path), path)))
    for path in ordered:
        if len(path) > 1 and path[:-1] not in ordered:
            raise UserError(f"static tree: node {path} stands without its parent {path[:-1]}; add it")
    top_k = 1 + max(max(path) for path in ordered)
    return TreeShape(depth=len(ordered[-1]), top_k=top_k, nodes=1 + len(ordered), paths=ordered, text=text)


def is_chain(shape: TreeShape) -> bool:
    """Return True if each node is the only child of the node before it. Such a tree needs no ancestor masks, and the
    keys of accepted tokens are already in place."""
    return shape.nodes == shape.depth + 1 and shape.top_k <= 1


class Pick(Protocol):
    """Function that draws children from the draft's distribution. The runtime provides it, because the acceptance rule
    depends on it."""

    def __call__(
        self, logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `count` (R) children of each of W nodes, best first.

        logits (B, W, Vx); positions (B, W) of the tokens to draw; token_ids (Vx,) the target ids of the columns, None
        if they are 0 .. Vx - 1. Returns target ids (B, W, R) and the log-probabilities (B, W, R) that trees rank them
        by: the draft's own or, if the target takes its likeliest token, sharper ones. A single child needs no rank, so
        its log-probability may be left out, as 0.
        """


def level_widths(shape: TreeShape) -> list[int]:
    if shape.paths is None:
        return [shape.top_k] * max(shape.depth - 1, 0)
    parents = {path[:-1] for path in shape.paths if len(path) > 1}
    at_level = Counter(map(len, parents))
    return [at_level[level] for level in range(1, shape.depth)]


def scratch_slots(shape: TreeShape) -> int:
    """Return the total number of nodes that `grow` expands: the slots that a round needs in the draft's cache after the
    root's."""
    return sum(level_widths(shape))
