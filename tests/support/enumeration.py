"""Distributions that are small enough to sum over all outcomes of a round."""

from collections.abc import Sequence
from itertools import permutations, product

import torch
from torch import Tensor

from eval.runtime.acceptance_rules import Rejection, Verdict
from heads.core.tree import Pick, Proposal, TreeShape, is_chain
from heads.kernels.slots import ancestors
from heads.parts.tree_growth import grow


class Toy:
    """Distributions p and q over a few tokens, random after every prefix.

    `support`: number of tokens that q can give after each prefix, as with a small draft vocabulary or a filter.
    """

    def __init__(self, vocab: int, depth: int, seed: int, support: int | None = None) -> None:
        self.vocab = vocab
        generator = torch.Generator().manual_seed(seed)
        sizes = [vocab**d for d in range(depth + 1)]
        self.p, self.q = [
            [-torch.rand(size, vocab, generator=generator, dtype=torch.float64).log() for size in sizes] for _ in "pq"
        ]  # by depth d: (V^d, V), exponential variables; normalised they are uniform over the simplex
        if support is not None:
            for table in self.q:
                table.scatter_(1, torch.rand(table.shape, generator=generator).argsort(1)[:, support:], 0.0)
        for table in (*self.p, *self.q):
            table /= table.sum(1, keepdim=True)

    def flat(self, which: str) -> tuple[Tensor, list[int]]:
        """Return all logits in one table, and the index at which each depth begins."""
        tables = self.p if which == "p" else self.q
        return torch.cat(tables).log(), [sum(map(len, tables[:d])) for d in range(len(tables))]

    def distribution(self, length: int) -> Tensor:
        """Return (V^length,) the target's distribution of its first `length` tokens."""
        return self.complete(torch.ones(1, dtype=torch.float64), length)

    def complete(self, distribution: Tensor, length: int) -> Tensor:
        """Return a distribution of the first d tokens, (V^d,), continued by the target to `length` tokens."""
        depth = next(d for d in range(length + 1) if self.vocab**d == len(distribution))
        for d in range(depth, length):
            distribution = (distribution[:, None] * self.p[d]).flatten()
        return distribution

    def grow(self, shape: TreeShape, pick: Pick, rows: int) -> tuple[Proposal, Tensor]:
        """Return `rows` trees from `grow`, and the prefixes of the nodes, (rows, N) numbers in base V."""
        V, codes = self.vocab, torch.zeros(rows, 1, dtype=torch.int64)

        def expand(tokens: Tensor, above: Tensor, paths: Tensor, level: int) -> Tensor:
            nonlocal codes
            codes = codes.gather(1, above) * V + tokens
            return self.q[level][codes].log()

        root = torch.zeros(rows, dtype=torch.int64)
        first = self.q[0][codes].log()
        proposal = grow(shape, root, root, first, pick, expand, None)
        return proposal, prefixes_of(proposal, V, root)

    def at(self, prefixes: Tensor, depths: Tensor) -> Tensor:
        """Return p after each node: (rows, N, V)."""
        table, starts = torch.cat(self.p), torch.tensor([sum(map(len, self.p[:d])) for d in range(len(self.p))])
        return table[starts[depths] + prefixes]


class EveryDraw:
    """A pick that enumerates all possible draws, one per row of the batch. `weight`: the probability of each row."""

    def __init__(self, counts: Sequence[int], vocab: int) -> None:
        """`counts`: number of children that are drawn at each node, in order."""
        self.ways = list(product(*(permutations(range(vocab), n) for n in counts)))
        self.done = 0
        self.weight = torch.ones(len(self.ways), dtype=torch.float64)
        self.likeliest = torch.ones(len(self.ways), dtype=torch.float64)  # 1 if all children are the likeliest
        self.distributions: list[Tensor] = []
        self.token_ids = None

    def __call__(
        self, logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        W = logits.shape[1]
        picked = torch.tensor([way[self.done : self.done + W] for way in self.ways])  # (rows, W, R)
        self.done += W
        self.distributions.append(logits)
        self.likeliest *= (picked == logits.topk(count).indices).all(-1).all(-1)
        left = logits.exp()
        for r in range(count):
            x = picked[..., r, None]
            mass = left.sum(-1, keepdim=True)
            # If no probability is left, a real pick takes some token; here the lowest unused one.
            taken = (picked[..., :r, None] == torch.arange(logits.shape[2])).any(-2)
            lowest = (~taken).long().argmax(-1, keepdim=True)
            chance = torch.where(mass > 0, left.gather(-1, x) / mass, (x == lowest).double())
            self.weight *= chance[..., 0].prod(1)
            left = left.scatter(-1, x, 0.0)
        return picked, logits.gather(-1, picked)

    def distribution(self, vocab: int) -> Tensor:
        return torch.cat(self.distributions, dim=1).exp()


def draws_of(shape: TreeShape) -> list[int]:
    """Return the number of children that `grow` draws at each node."""
    if shape.paths is None:
        return [shape.top_k] * (1 + (shape.depth - 1) * shape.top_k)
    counts = []
    for level in range(1, shape.depth + 1):
        nodes = [path for path in shape.paths if len(path) == level]
        counts += [1 + max(path[-1] for path in nodes)] * len({path[:-1] for path in nodes})
    return counts


def prefixes_of(proposal: Proposal, vocab: int, root: Tensor) -> Tensor:
    """Return the text up to each node, (rows, N) numbers in base V, after those of the roots, (rows,)."""
    prefixes = root[:, None].repeat(1, proposal.tokens.shape[1])
    for j in range(1, proposal.tokens.shape[1]):
        above = prefixes.gather(1, proposal.parents[:, j, None])[:, 0]
        prefixes[:, j] = above * vocab + proposal.tokens[:, j]
    return prefixes


def sum_over_tests(
    rule: Rejection, proposal: Proposal, verdict: Verdict, prefixes: Tensor, drawn: Tensor
) -> list[Tensor]:
    """Return the distribution of the emitted tokens for each number n of accepted tokens, (V^n, V), summed over all
    outcomes of the tests. `drawn` (rows,): the probability of each draft."""
    K, V, rows = rule.shape.depth, verdict.residual.shape[2], len(drawn)
    above = None if is_chain(rule.shape) else ancestors(proposal.parents, K)
    parts = [torch.zeros(V**n, V, dtype=torch.float64) for n in range(K + 1)]
    for passed in product([False, True], repeat=rule.shape.nodes - 1):
        tests = torch.tensor([True, *passed]).expand(rows, -1)
        weight = drawn * torch.where(tests, verdict.accept_prob, 1 - verdict.accept_prob).prod(1)
        accepted, path = rule.decide(tests, proposal, above)
        end = path.gather(1, accepted[:, None])
        distribution = verdict.residual.gather(1, end[..., None].expand(-1, -1, V))[:, 0]
        at = prefixes.gather(1, end)[:, 0]
        for n, part in enumerate(parts):
            part.index_add_(0, at % V**n, torch.where(accepted == n, weight, 0.0)[:, None] * distribution)
    return parts


def chi_square(codes: Tensor, distribution: Tensor) -> tuple[float, float]:
    """Return the statistic of `codes` against `distribution`, and the value that chance exceeds once in a million times
    (Wilson and Hilferty's approximation). Cells that expect fewer than ten are taken together."""
    expected = distribution * len(codes)
    counts = torch.bincount(codes, minlength=len(distribution)).double()
    rare = expected < 10
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    due = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = due > 1e-9
    assert not seen[~kept].any(), "something came out that the distribution excludes"
    free = int(kept.sum()) - 1
    limit = free * (1 - 2 / (9 * free) + 4.75 * (2 / (9 * free)) ** 0.5) ** 3
    return float(((seen - due) ** 2 / due)[kept].sum()), limit
