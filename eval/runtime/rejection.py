"""Arithmetic of the rules that compare two distributions: the target's p, and q, from which the draft was drawn.

`ratio` (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2), on trees as
recursive rejection with siblings drawn without replacement (Sequoia, arXiv 2402.12374, algorithm 2). The children x of
a node are tried in the order in which they were drawn:

    accept x with probability min(1, P(x) / Q(x)), at first P = p and Q = q
    if refused: P <- norm(max(P - Q, 0)), Q(x) <- 0, Q <- norm(Q)
    if all are refused, the round ends here with a token drawn from P; at a leaf, from p

`block` (Sun et al., arXiv 2403.10444, algorithm 2) judges a chain x_1 .. x_K as a whole. p_i and q_i stand for the
distributions after x_1 .. x_i:

    w_0 = 1,  w_i = min(1, w_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i))
    h_K = w_K,  h_i = S_i / (S_i + 1 - w_i)  with  S_i = sum_v max(w_i p_i(v) - q_i(v), 0)
    accepted = the largest i whose own test of probability h_i passes, or 0
    the last token is drawn from norm(max(w_i p_i - q_i, 0)), from p_K if all of the chain is accepted

Randomness enters from outside, as tests that passed or did not: every test's probability depends on the tree alone, so
the distribution of what comes out can be summed up exactly, and is, in the tests.

Letters: B rows, N nodes, I nodes that have children, R children of a node, K depth, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.runtime.acceptance import deepest_path
from heads.tree import Proposal, TreeShape, is_chain


@dataclass(frozen=True)
class Family:
    """Descent of nodes as fixed by the shape. Nodes stand in the order of `heads.growth.grow`, and so siblings in the
    order in which they were drawn."""

    parents: Tensor  # (I,) int64, the nodes that have children, ascending: the order in which `grow` asks for draws
    children: Tensor  # (I, R) int64, in the order drawn; 0 where there are fewer
    there: Tensor  # (I, R) bool
    place: Tensor  # (N - 1,) int64: node j's place in `children`, flattened, at j - 1


def family_of(shape: TreeShape, device: torch.device | str = "cpu") -> Family:
    """Return the family of a chain or a static tree, whose siblings have consecutive ranks."""
    if is_chain(shape):
        children = [[node + 1] for node in range(shape.depth)]
        parents = list(range(shape.depth))
    else:
        assert shape.paths is not None
        node_of = {(): 0, **{path: 1 + i for i, path in enumerate(shape.paths)}}
        by_parent: dict[int, list[int]] = {}
        for path in shape.paths:
            by_parent.setdefault(node_of[path[:-1]], []).append(node_of[path])
        parents, children = list(by_parent), list(by_parent.values())
        assert parents == sorted(parents), parents
    R = max(map(len, children))
    place = {child: i * R + r for i, own in enumerate(children) for r, child in enumerate(own)}
    return Family(
        parents=torch.tensor(parents, device=device),
        children=torch.tensor([own + [0] * (R - len(own)) for own in children], device=device),
        there=torch.tensor([[r < len(own) for r in range(R)] for own in children], device=device),
        place=torch.tensor([place[j] for j in range(1, shape.nodes)], device=device),
    )


@dataclass(frozen=True)
class Verdict:
    """Probabilities of a rule's tests on a tree, and the distributions after them."""

    odds: Tensor  # (B, N), the probability that node j's own test passes; 1 for the root
    rest: Tensor  # (B, N, V), the distribution of the token that follows if the round ends at node j


def ratio(p: Tensor, q: Tensor, tokens: Tensor, family: Family) -> Verdict:
    """Recursive rejection: p (B, N, V), q (B, I, V), tokens (B, N).

    A test is the one that is made once all elder siblings were refused. A token that q cannot have given is never
    accepted and changes nothing: q had fewer tokens than the node has children.
    """
    P, Q = p[:, family.parents], q  # (B, I, V)
    odds = []
    for r in range(family.children.shape[1]):
        x = tokens[:, family.children[:, r]][..., None]  # (B, I, 1)
        drawn = Q.gather(-1, x)
        tested = family.there[:, r, None] & (drawn > 0)
        odds.append(torch.where(tested, quotient(P.gather(-1, x), drawn).clamp(max=1), 0.0))
        P = torch.where(tested, residual(P, Q), P)
        Q = torch.where(tested, normalised(Q.scatter(-1, x, 0.0), Q), Q)
    by_child = torch.cat(odds, dim=-1).flatten(1)[:, family.place]  # (B, N - 1)
    return Verdict(torch.cat([torch.ones_like(by_child[:, :1]), by_child], 1), p.index_copy(1, family.parents, P))


def block(p: Tensor, q: Tensor, tokens: Tensor) -> Verdict:
    """Apply block verification to a chain: p (B, K + 1, V), q (B, K, V), tokens (B, K + 1)."""
    K = q.shape[1]
    x = tokens[:, 1:, None]  # (B, K, 1)
    ratios = quotient(p[:, :-1].gather(-1, x), q.gather(-1, x))
    weights = [torch.ones_like(ratios[:, 0])]
    for i in range(K):
        weights.append((weights[-1] * ratios[:, i]).clamp(max=1))
    w = torch.stack(weights, dim=1)  # (B, K + 1, 1)
    before = w[:, :-1]
    excess = (before * p[:, :-1] - q).clamp_min(0).sum(-1, keepdim=True)
    # Where w = 1 and nothing exceeds q, the two distributions are one: the test is a formality, and so is what would
    # follow it.
    whole = excess + (1 - before)
    odds = torch.where(whole > 0, excess / whole, 1.0)
    rest = residual(before * p[:, :-1], q, otherwise=p[:, :-1])
    odds = torch.cat([torch.ones_like(odds[:, :1]), odds[:, 1:], w[:, -1:]], dim=1)
    return Verdict(odds[..., 0], torch.cat([rest, p[:, -1:]], dim=1))


def expected_tokens(odds: Tensor, *, whole: bool) -> Tensor:
    """Return (B,), the expected tokens of a chain of these odds (B, K + 1), the last one included.

    It is one more than the sum over k of the probability that at least k are accepted: for `ratio` that the first k
    tests pass, for `block` (`whole`) that one from the k-th on does.
    """
    tests = odds[:, 1:]
    reached = 1 - (1 - tests).flip(1).cumprod(1) if whole else tests.cumprod(1)
    return 1 + reached.sum(1)


def quotient(p: Tensor, q: Tensor) -> Tensor:
    """Return p / q, or 0 where q is 0, which no drawn token has."""
    return torch.where(q > 0, p / q, 0.0)


def residual(p: Tensor, q: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Return norm(max(p - q, 0)) over the last dimension, or p itself (`otherwise`) where no mass is left: then q
    covers p, a refusal has probability 0, and any distribution will do."""
    return normalised((p - q).clamp_min(0), p if otherwise is None else otherwise)


def normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    """Return `mass` over its sum, or `otherwise` where that is 0."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, otherwise)


def first_accepted(passed: Tensor, proposal: Proposal, above: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Descend to the eldest child whose test passed as long as there is one: passed (B, N) -> the number accepted (B,),
    and their path (B, K + 1) from the root."""
    node = torch.arange(passed.shape[1], device=passed.device)
    siblings = (proposal.parents[:, :, None] == proposal.parents[:, None, :]) & (node[:, None] > node) & (node > 0)
    refused_before = ~(passed[:, None, :] & siblings).any(dim=2)
    return deepest_path(proposal, (passed & refused_before) | (node == 0), above, depth)


def last_accepted(passed: Tensor) -> tuple[Tensor, Tensor]:
    """Decide by `block`: the last node of a chain whose test passed, whatever happened to those before it."""
    place = torch.arange(passed.shape[1], device=passed.device).expand_as(passed)
    return (place * passed).amax(dim=1), place


def leading(passed: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `first_accepted` of a chain: the nodes before the first whose test failed."""
    place = torch.arange(passed.shape[1], device=passed.device).expand_as(passed)
    return passed[:, 1:].cumprod(dim=1).sum(dim=1), place
