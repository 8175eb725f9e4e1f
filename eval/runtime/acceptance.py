"""The acceptance rules at work: they draw a round's drafts and decide which of them are kept.

`match` is a backend's (`heads.backends.torch.accept`). At temperature 0 all are one rule. Above
it the last two need q, the very distribution that a draft token was drawn from: the draft's logits under the same
temperature, top-k, top-p and min-p as the target's, over the full vocabulary. So they refuse drafts that draw from no
distribution, and trees in which it depends on the draws who stays: the distribution of what survives a reranking is not
q.

Their noise is counter-based as `match`'s is, in four streams that know nothing of each other: the drafts', the tests',
the last token's, and `match`'s own, which chooses a request's first token. None may be shared, and none is keyed by
position alone: `block` refuses a whole chain for what its last tokens are, so that a token not emitted still says
something of the noise at its position. The root's position, which no two rounds of a request share, is in every key.

The other two compare the target's p with q, from which the draft was drawn.

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

Letters: B rows, N nodes, W nodes drawn for at once, R children of a node, I nodes that have children, K depth, V
vocabulary, Vx columns of a draft's logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from eval.runtime.sampling import check_rule
from heads.backends.base import Backend
from heads.backends.torch.accept import deepest_path
from heads.backends.torch.noise import stream, uniform
from heads.backends.torch.sampling import RowSampling
from heads.errors import UserError
from heads.tree import MOST_NODES, Acceptance, Pick, Proposal, TreeShape, is_chain

if TYPE_CHECKING:
    from eval.runtime.round import TargetStep

DRAFTS, TESTS, LAST = 0x3C79AC492BA7B653, 0x1CE4E5B9BF58476D, 0x14D049BB133111EB
"""Numbers of the streams by purpose; any three distinct ones."""


class Rule(Protocol):
    """Interface of an acceptance rule to a round."""

    needs_distribution: bool
    """True if the rule needs the target's whole distribution; else the target's choices are enough."""

    def begin(self) -> Pick:
        """Return the function that draws this round's drafts."""

    def consult(self, step: "TargetStep", hidden: Tensor, positions: Tensor) -> Tensor:
        """Return what the target says at each node: hidden (B, N, D); positions (B, N) of the tokens that follow."""

    def accept(self, proposal: Proposal, consulted: Tensor, positions: Tensor, above: Tensor | None) -> Acceptance:
        """Judge the drafts; above (B, N, N) is `heads.backends.slot_mapping.ancestors`, None for a chain."""


def make_rule(name: str, shape: TreeShape, sampling: RowSampling, backend: Backend) -> Rule:
    """Return the rule of that name for trees of one shape. UserError if there is none."""
    check_rule(name, shape)
    return Match(shape, sampling, backend.match) if name == "match" else Rejection(name, shape, sampling)


class Match:
    """The rule `match`, by the target's own choices."""

    needs_distribution = False

    def __init__(self, shape: TreeShape, sampling: RowSampling, match: Callable[..., Acceptance]) -> None:
        """`match`: a backend's."""
        self.shape, self.sampling, self.match = shape, sampling, match

    def begin(self) -> Pick:
        return self.sampling.pick

    def consult(self, step: "TargetStep", hidden: Tensor, positions: Tensor) -> Tensor:
        return step.choose(hidden, positions, self.sampling)  # (B, N)

    def accept(self, proposal: Proposal, consulted: Tensor, positions: Tensor, above: Tensor | None) -> Acceptance:
        if self.shape.nodes == 1:  # a root alone emits the target's choice
            return Acceptance(proposal.depths[:, 0], proposal.depths, consulted)  # zeros
        return self.match(proposal, consulted, above, self.shape.depth)


class Draws:
    """One round's picks: children drawn from the draft's distribution, which is kept for the verdict.

    Siblings are drawn without replacement and stand in the order drawn: falling log q + Gumbel noise. A greedy row
    drafts its likeliest tokens.
    """

    def __init__(self, sampling: RowSampling) -> None:
        self.sampling = sampling
        self.distributions: list[Tensor] = []
        """Log q of the nodes drawn for, (B, W, Vx) float32, by level."""
        self.token_ids: Tensor | None = None

    def __call__(
        self, logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        sampling = self.sampling
        self.token_ids = token_ids
        logq = sampling.log_distribution(logits)
        self.distributions.append(logq)
        if not sampling.random:
            columns = best(logits, count)
        else:
            ids = torch.arange(logits.shape[2], device=logits.device) if token_ids is None else token_ids
            counters = draw_counters(positions, len(self.distributions))
            noise = sampling.gumbel(stream(sampling.seed, DRAFTS), counters, ids)  # (B, W, Vx)
            hot = (sampling.temperature > 0)[:, None, None]
            columns = best(torch.where(hot, noise + logq, logits.float()), count)
        return columns if token_ids is None else token_ids[columns], logq.gather(-1, columns)

    def distribution(self, vocab: int) -> Tensor:
        """Return (B, I, V) q over the target's vocabulary, in the order of the nodes."""
        q = torch.cat(self.distributions, dim=1).exp()
        if self.token_ids is not None:
            return q.new_zeros(*q.shape[:2], vocab).index_copy_(2, self.token_ids, q)
        assert q.shape[2] <= vocab, f"a draft over {q.shape[2]} tokens, a target of {vocab}"
        return torch.nn.functional.pad(q, (0, vocab - q.shape[2]))


def best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest scores in the last dimension, in falling order."""
    return scores.argmax(-1, keepdim=True) if count == 1 else scores.topk(count, dim=-1).indices


def draw_counters(positions: Tensor, level: int) -> Tensor:
    """Return (B, W) int64, a distinct number for each node of a request that is drawn for: positions (B, W) of the
    drawn tokens, and their level below the root, which together give the root's position."""
    return (positions * MOST_NODES + level) * MOST_NODES**2 + torch.arange(positions.shape[1], device=positions.device)


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
    paths = [(0,) * k for k in range(1, shape.depth + 1)] if is_chain(shape) else shape.paths
    assert paths is not None
    node_of = {(): 0, **{path: 1 + i for i, path in enumerate(paths)}}
    by_parent: dict[int, list[int]] = {}
    for path in paths:
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


class Rejection:
    """The rules `ratio` and `block`, by the two distributions."""

    needs_distribution = True

    def __init__(self, name: str, shape: TreeShape, sampling: RowSampling) -> None:
        self.name, self.shape, self.sampling = name, shape, sampling
        self.family = family_of(shape, sampling.seed.device)
        self.draws = Draws(sampling)

    def begin(self) -> Pick:
        self.draws = Draws(self.sampling)
        return self.draws

    def consult(self, step: "TargetStep", hidden: Tensor, positions: Tensor) -> Tensor:
        return self.sampling.log_distribution(step.logits(hidden)).exp()  # (B, N, V)

    def accept(self, proposal: Proposal, consulted: Tensor, positions: Tensor, above: Tensor | None) -> Acceptance:
        verdict = self.weigh(proposal, consulted)
        device, seed = positions.device, self.sampling.seed
        root = positions[:, :1] - 1
        node = torch.arange(self.shape.nodes, device=device)
        passed = uniform(stream(seed, TESTS), root, node)[:, 0] < verdict.odds
        accepted, path = self.decide(passed, proposal, above)
        end = path.gather(1, accepted[:, None])  # (B, 1)
        rest = verdict.rest.gather(1, end[..., None].expand(-1, -1, verdict.rest.shape[2]))  # (B, 1, V)
        noise = self.sampling.gumbel(stream(seed, LAST), root, torch.arange(rest.shape[2], device=device))
        last = (rest.log() + noise).argmax(dim=-1)  # (B, 1)
        drafted = proposal.tokens.gather(1, path).roll(-1, dims=1)  # at the end padding, which only `last` covers
        return Acceptance(accepted, path, drafted.scatter(1, accepted[:, None], last))

    def weigh(self, proposal: Proposal, p: Tensor) -> Verdict:
        """Judge drafts that `begin`'s pick has drawn; p (B, N, V)."""
        if not self.draws.distributions:
            raise UserError(
                f"rule {self.name} needs the distribution that the draft was drawn from, and this draft is drawn from "
                "none; use rule match"
            )
        q, tokens = self.draws.distribution(p.shape[2]), proposal.tokens
        assert q.shape[1] == len(self.family.parents), f"{q.shape[1]} draws, {len(self.family.parents)} nodes to expand"
        if self.name == "block":
            return block(p, q, tokens)
        verdict = ratio(p, q, tokens, self.family)
        # A greedy row drafts several tokens where its distribution has one: each is given, and so accepted if p is all
        # on it.
        hot = (self.sampling.temperature > 0)[:, None]
        chosen = p.argmax(dim=-1).gather(1, proposal.parents) == tokens  # (B, N)
        odds = torch.where(hot, verdict.odds, chosen.to(verdict.odds.dtype))
        return Verdict(odds, torch.where(hot[..., None], verdict.rest, p))

    def decide(self, passed: Tensor, proposal: Proposal, above: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the path that the passed tests (B, N) accept."""
        if self.name == "block":
            return last_accepted(passed)
        return leading(passed) if above is None else first_accepted(passed, proposal, above, self.shape.depth)


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
