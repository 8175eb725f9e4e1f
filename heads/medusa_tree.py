"""Medusa's static tree (Cai et al., arXiv 2401.10774, section 2.3.3): the likeliest nodes by measured accuracy.

a_k(i) is how often the true token was the i-th of head k's candidates. If heads err independently, the node of path
(i_1, .., i_d) is right with probability a_1(i_1) * .. * a_d(i_d), and the expected number of accepted tokens is the sum
of that over the tree. No node is likelier than the one above it, so the likeliest n nodes are a tree, and the best one.

Letters: K depths, R ranks.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_RANKS = 32
"""Candidates of one head that a tree may use."""

Path = tuple[int, ...]


def rank_accuracies(ranks: Tensor, valid: Tensor, most: int) -> Tensor:
    """(K, most) float64: the share of `valid` (K, ...) slots where the true token had each rank in `ranks` (K, ...)."""
    hits = torch.stack([(valid & (ranks == rank)).flatten(1).sum(1) for rank in range(most)], dim=1)
    return hits.double() / valid.flatten(1).sum(1).clamp_min(1)[:, None]


def grow_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[Path, ...]:
    """The paths of the likeliest nodes, `nodes` of them with the root, which has no path of its own.

    accuracies (K, R). Fewer where no other node can be right; the first path at least. Ties go to the shorter path,
    then to the better ranks.
    """
    found: list[Path] = []
    heap: list[tuple[float, int, Path]] = [(-accuracy, 1, (rank,)) for rank, accuracy in enumerate(accuracies[0])]
    heapq.heapify(heap)
    while heap and len(found) < nodes - 1:
        negative, depth, path = heapq.heappop(heap)
        if negative == 0 and found:
            break
        found.append(path)
        if depth < len(accuracies):
            for rank, accuracy in enumerate(accuracies[depth]):
                heapq.heappush(heap, (negative * accuracy, depth + 1, (*path, rank)))
    return tuple(sorted(found, key=lambda path: (len(path), path)))
