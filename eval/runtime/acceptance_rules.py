"""Acceptance rules: they draw a round's draft tokens and decide which of them are accepted.

By `match` the target chooses a token at every node. Starting at the root, follow children with the chosen token as far
as possible. The tokens on this path are accepted, and the choice at its last node is the bonus token. So the output is
the sequence of the target's own choices, whatever the tree. If siblings have the same token, the deepest path wins,
then the lowest node.

`ratio` and `block` compare the target's p with q, the distribution that a draft token was drawn from. At temperature 0
all rules accept the same tokens. Above it, `ratio` and `block` need the exact q: the draft's logits under the same
temperature, top-k, top-p and min-p as the target's, over the full vocabulary; penalties change p alone. So they reject
drafts that are not drawn from a distribution, but for copied ones: a lookup's tokens have q = 1. They also reject trees
whose nodes are selected by the draws: the distribution of the nodes that survive a reranking is not q.

Their noise is counter-based like that of `match`, in four independent streams: for the drafts, for the tests, for the
last token, and that of `match`, which chooses a request's first token. No stream may be shared, and none is keyed by
position alone: `block` may reject a whole chain because of its last tokens, so even a token that was not emitted
carries information about the noise at its position. Every key contains the root's position, which no two rounds of a
request share.

`ratio` (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2) is generalised to
trees as recursive rejection with siblings drawn without replacement (Sequoia, arXiv 2402.12374, algorithm 2). The
children x of a node are tried in the order in which they were drawn:

    accept x with probability min(1, P(x) / Q(x)), at first P = p and Q = q
    if rejected: P <- norm(max(P - Q, 0)), Q(x) <- 0, Q <- norm(Q)
    if all are rejected: the round ends here with a token drawn from P; at a leaf, from p

`block` (Sun et al., arXiv 2403.10444, algorithm 2) judges a chain x_1 .. x_K as a whole. p_i and q_i are the
distributions after x_1 .. x_i:

    w_0 = 1,  w_i = min(1, w_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i))
    h_K = w_K,  h_i = S_i / (S_i + 1 - w_i)  with  S_i = sum_v max(w_i p_i(v) - q_i(v), 0)
    accepted = the largest i whose own test of probability h_i passes, or 0
    the last token is drawn from norm(max(w_i p_i - q_i, 0)) with i = accepted, or from p_K if i = K

`likeliest` draws nothing: it is `ratio` with a q that has all its mass on the draft's likeliest token, or for siblings
on one after the other. So a child x is accepted with probability P(x), and else P(x) <- 0 and P <- norm(P). What is
drafted depends on the text alone, so any tree and any draft will do. vLLM (`draft_sample_method` greedy, its default)
and SGLang accept sampled text so.

The functions are given the results of the random tests. The probability of each test depends only on the tree, so the
exact distribution of the output can be computed, and the unit tests compute it.

Letters: B rows, N nodes, W nodes whose children are drawn at once, R children of a node, I nodes that have children, K
depth, V vocabulary, Vx columns of a draft's logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.runtime.distribution import SHARPNESS, RowSampling, best_columns
from eval.runtime.sampling_params import check_rule
from heads.core.errors import UserError
from heads.core.tree import MAX_NODES, Acceptance, Pick, Proposal, TreeShape, is_chain
from heads.kernels.gumbel import gumbel, stream, uniform
from heads.targets.cached_decoder import CachedDecoder

DRAFTS, TESTS, LAST = 0x3C79AC492BA7B653, 0x1CE4E5B9BF58476D, 0x14D049BB133111EB
"""Identifiers of the noise streams, by purpose: any three distinct numbers."""


class Match:
    """Rule `match`: a draft token is accepted if it is the target's own choice."""

    def __init__(self, shape: TreeShape, sampling: RowSampling, target: CachedDecoder) -> None:
        self.shape, self.sampling, self.target = shape, sampling, target

    def begin(self) -> Pick:
        """Return the function that draws this round's draft tokens."""
        return self.sampling.pick

    def target_outputs(self, hidden: Tensor, positions: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the target's choice (B, N) after each node. hidden (B, N, D); positions (B, N) of the tokens after the
        nodes; counts (B, N, V): `Decoder.counts` up to each node.

        Rows with filters or penalties need all logits. The choices of the other rows must not depend on such rows.
        """
        sampling, target = self.sampling, self.target
        any_needs = sampling.filtered or sampling.penalised
        if not target.in_tiles or (any_needs and len(hidden) == 1):
            return sampling.choose(target.logits(hidden), positions, counts)
        chosen = target.choose(hidden, positions, sampling.temperature, sampling.seed, noisy=sampling.random)
        if not any_needs:
            return chosen
        of_logits = sampling.choose(target.logits(hidden), positions, counts)
        return torch.where(sampling.needs_logits[:, None], of_logits, chosen)

    def accept(self, proposal: Proposal, outputs: Tensor, positions: Tensor, above: Tensor | None) -> Acceptance:
        """Decide which draft tokens are accepted. outputs: from `target_outputs`; above (B, N, N):
        `heads.kernels.slots.ancestors`, or None for a chain."""
        if self.shape.nodes == 1:  # without drafts a round emits the target's choice after the root
            return Acceptance(proposal.depths[:, 0], proposal.depths, outputs)  # the depths are zeros
        if above is None:
            return match_chain(proposal, outputs)
        return match(proposal, outputs, above, self.shape.depth)


def match(proposal: Proposal, choice: Tensor, above: Tensor, depth: int) -> Acceptance:
    """Accept the deepest path of chosen tokens.

    choice (B, N): the token that the target chose after each node; above (B, N, N): `heads.kernels.slots.ancestors` of
    the proposal; depth: K, the maximum number of levels of this tree shape. A node whose parent is not exactly one
    level above it is never accepted.
    """
    B, N = choice.shape
    node = torch.arange(N, device=choice.device).expand(B, N)
    parent_depths = proposal.depths.gather(1, proposal.parents)
    follows = (proposal.tokens == choice.gather(1, proposal.parents)) & (proposal.depths == parent_depths + 1)
    accepted, path = deepest_path(proposal, follows | (node == 0), above, depth)
    # The choice at a node of the path is the token of the path's next node; at the last node it is the bonus token.
    return Acceptance(accepted, path, choice.gather(1, path))


def deepest_path(proposal: Proposal, follows: Tensor, above: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the deepest path whose nodes are all True in `follows` (B, N); among equal depths, the lowest node wins.
    Return its length (B,) and its nodes (B, K + 1), the root first."""
    B, N = follows.shape
    node = torch.arange(N, device=follows.device).expand(B, N)
    alive = (follows[:, None, :] | ~above).all(dim=2)  # the node and all of its ancestors follow
    best = torch.where(alive, proposal.depths * N + (N - 1 - node), -1).argmax(dim=1, keepdim=True)  # (B, 1)
    on_path = above.gather(1, best[..., None].expand(B, 1, N))[:, 0]  # (B, N)
    # Each node on the path goes to the index of its depth, all other nodes to an index that is cut off.
    path = torch.zeros(B, depth + 2, dtype=torch.int64, device=follows.device)
    path = path.scatter_(1, torch.where(on_path, proposal.depths, depth + 1), node)[:, : depth + 1]
    return proposal.depths.gather(1, best)[:, 0], path


def match_chain(proposal: Proposal, choice: Tensor) -> Acceptance:
    """Accept a chain, in which each node is the child of the previous one; choice (B, K + 1)."""
    accepted = (proposal.tokens[:, 1:] == choice[:, :-1]).cumprod(dim=1).sum(dim=1)
    return Acceptance(accepted, proposal.depths, choice)  # the nodes of a chain have their depths as indices


class Draws:
    """Pick of one round: it draws children from the draft's distribution, which is kept for the tests.

    Siblings are drawn without replacement, in the order of falling log q + Gumbel noise. A greedy row drafts its
    likeliest tokens.
    """

    def __init__(self, sampling: RowSampling) -> None:
        self.sampling = sampling
        self.distributions: list[Tensor] = []
        """Log q after the nodes whose children were drawn, (B, W, Vx) float32, by level."""
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
            noise = gumbel(stream(sampling.seed, DRAFTS), counters, ids)  # (B, W, Vx)
            is_sampled = (sampling.temperature > 0)[:, None, None]
            columns = best(torch.where(is_sampled, noise + logq, logits.float()), count)
        return columns if token_ids is None else token_ids[columns], logq.gather(-1, columns)

    def distribution(self, vocab: int) -> Tensor:
        """Return q (B, I, V) over the target's vocabulary, in the order of the nodes."""
        q = torch.cat(self.distributions, dim=1).exp()
        if self.token_ids is not None:
            return q.new_zeros(*q.shape[:2], vocab).index_copy_(2, self.token_ids, q)
        assert q.shape[2] <= vocab, f"a draft over {q.shape[2]} tokens, a target of {vocab}"
        return torch.nn.functional.pad(q, (0, vocab - q.shape[2]))


def best(scores: Tensor, count: int) -> Tensor:
    return scores.argmax(-1, keepdim=True) if count == 1 else scores.topk(count, dim=-1).indices


def draw_counters(positions: Tensor, level: int) -> Tensor:
    """Return (B, W) int64, a number for each node whose children are drawn, distinct within a request. positions
    (B, W): of the drawn tokens; level: theirs below the root. The two together determine the root's position."""
    return (positions * MAX_NODES + level) * MAX_NODES**2 + torch.arange(positions.shape[1], device=positions.device)


@dataclass(frozen=True)
class Family:
    """Parents and children of the nodes of a shape. Nodes are in the order of `heads.parts.tree_growth.grow`,
    so siblings are in the order in which they were drawn."""

    parents: Tensor  # (I,) int64, the nodes that have children, ascending: the order in which `grow` draws children
    children: Tensor  # (I, R) int64, in the order drawn; 0 for padding
    there: Tensor  # (I, R) bool, False for padding
    place: Tensor  # (N - 1,) int64: entry j - 1 is the index of node j in `children`, flattened


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
    place = {child: i * R + r for i, siblings in enumerate(children) for r, child in enumerate(siblings)}
    return Family(
        parents=torch.tensor(parents, device=device),
        children=torch.tensor([siblings + [0] * (R - len(siblings)) for siblings in children], device=device),
        there=torch.arange(R, device=device) < torch.tensor([*map(len, children)], device=device)[:, None],
        place=torch.tensor([place[j] for j in range(1, shape.nodes)], device=device),
    )


@dataclass(frozen=True)
class Verdict:
    """Probabilities of a rule's tests on a tree, and the distributions of the last token."""

    accept_prob: Tensor  # (B, N), the probability that node j's own test passes; 1 for the root
    residual: Tensor  # (B, N, V), the distribution of the last token if the round ends at node j


class Rejection:
    """Rules `ratio`, `block` and `likeliest`, which test each draft token by its probability."""

    def __init__(self, name: str, shape: TreeShape, sampling: RowSampling, target: CachedDecoder) -> None:
        self.name, self.shape, self.sampling, self.target = name, shape, sampling, target
        self.family = None if name == "likeliest" else family_of(shape, sampling.seed.device)
        self.draws = Draws(sampling)

    def begin(self) -> Pick:
        """Return the function that draws this round's draft tokens."""
        if self.family is None:
            return self.pick_without_noise
        self.draws = Draws(self.sampling)
        return self.draws

    def pick_without_noise(
        self, logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        sharpness = torch.where(self.sampling.temperature > 0, 1.0, SHARPNESS)[:, None, None]
        return best_columns(logits, sharpness, count, token_ids)

    def target_outputs(self, hidden: Tensor, positions: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the target's distribution (B, N, V) after each node. Arguments as in `Match.target_outputs`."""
        return self.sampling.log_distribution(self.target.logits(hidden), counts).exp()

    def accept(self, proposal: Proposal, outputs: Tensor, positions: Tensor, above: Tensor | None) -> Acceptance:
        """Decide which draft tokens are accepted. Arguments as in `Match.accept`."""
        verdict = self.accept_probs(proposal, outputs)
        device, seed = positions.device, self.sampling.seed
        root = positions[:, :1] - 1
        node = torch.arange(self.shape.nodes, device=device)
        passed = uniform(stream(seed, TESTS), root, node)[:, 0] < verdict.accept_prob
        accepted, path = self.decide(passed, proposal, above)
        end = path.gather(1, accepted[:, None])  # (B, 1)
        p_last = verdict.residual.take_along_dim(end[..., None], 1)  # (B, 1, V)
        noise = gumbel(stream(seed, LAST), root, torch.arange(p_last.shape[2], device=device))
        last = (p_last.log() + noise).argmax(dim=-1)  # (B, 1)
        drafted = proposal.tokens.gather(1, path).roll(-1, dims=1)  # its last column is padding for `last` to replace
        return Acceptance(accepted, path, drafted.scatter(1, accepted[:, None], last))

    def accept_probs(self, proposal: Proposal, p: Tensor) -> Verdict:
        """Return the verdict on the draft tokens that the pick of `begin` has drawn. p (B, N, V)."""
        if self.family is None:
            return one_by_one(p, proposal)
        q, tokens = self.draft_distribution(proposal, p.shape[2]), proposal.tokens
        if self.name == "block":
            return block(p, q, tokens)
        verdict = ratio(p, q, tokens, self.family)
        # In a greedy row q has only one token, but several children may be drafted, without a draw. So the token that
        # has all of p is accepted.
        is_sampled = (self.sampling.temperature > 0)[:, None]
        chosen = p.argmax(dim=-1).gather(1, proposal.parents) == tokens  # (B, N)
        accept_prob = torch.where(is_sampled, verdict.accept_prob, chosen.to(verdict.accept_prob.dtype))
        return Verdict(accept_prob, torch.where(is_sampled[..., None], verdict.residual, p))

    def draft_distribution(self, proposal: Proposal, vocab: int) -> Tensor:
        """Return q (B, I, V). A copied draft, which is a chain, has probability 1 at each of its tokens."""
        drawn = self.draws.distribution(vocab) if self.draws.distributions else None
        if proposal.copied is not None:
            tokens = proposal.tokens[:, 1:, None]
            certain = torch.zeros(*tokens.shape[:2], vocab, device=tokens.device).scatter_(2, tokens, 1.0)
            return certain if drawn is None else torch.where(proposal.copied[:, None, None], certain, drawn)
        if drawn is None:
            raise UserError(
                f"rule {self.name} needs the distribution that the draft was drawn from, and this draft is drawn from "
                "none; use rule match"
            )
        return drawn

    def decide(self, passed: Tensor, proposal: Proposal, above: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the number of accepted tokens (B,) and their path (B, K + 1) from the root, given the passed tests
        (B, N)."""
        node = torch.arange(passed.shape[1], device=passed.device).expand_as(passed)
        if self.name == "block":  # up to the last node whose test passed, whether or not the tests before it passed
            return (node * passed).amax(dim=1), node
        if above is None:  # all nodes before the first whose test failed
            return passed[:, 1:].cumprod(dim=1).sum(dim=1), node
        # From the root, descend to the eldest child whose test passed, as long as there is one.
        siblings = proposal.parents[:, :, None] == proposal.parents[:, None, :]
        elder = siblings & (node[:, None] < node[..., None]) & (node[:, None] > 0)
        rejected_before = ~(passed[:, None, :] & elder).any(dim=2)
        return deepest_path(proposal, (passed & rejected_before) | (node == 0), above, self.shape.depth)


Rule = Match | Rejection


def make_rule(name: str, shape: TreeShape, sampling: RowSampling, target: CachedDecoder) -> Rule:
    """Return the rule of that name for trees of one shape. Raise UserError if it cannot judge them."""
    check_rule(name, shape)
    return Match(shape, sampling, target) if name == "match" else Rejection(name, shape, sampling, target)


def one_by_one(p: Tensor, proposal: Proposal) -> Verdict:
    """Accept each child with the target's probability of it, given that its elder siblings were rejected: p (B, N, V).
    A token that an elder sibling has too, and a node that is not one level below its parent, are never accepted."""
    (B, N), V = proposal.tokens.shape, p.shape[2]
    node = torch.arange(N, device=p.device)
    parents, depths, tokens = proposal.parents, proposal.depths, proposal.tokens
    is_child = (node > 0) & (depths == depths.gather(1, parents) + 1)  # (B, N)
    elder = (parents[:, :, None] == parents[:, None, :]) & (node < node[:, None]) & is_child[:, None, :]
    repeated = (elder & (tokens[:, :, None] == tokens[:, None, :])).any(dim=2)
    of_parent = p.gather(1, parents[..., None].expand(B, N, V)).gather(2, tokens[..., None])[..., 0]
    mass = torch.where(is_child & ~repeated, of_parent, 0.0)
    left = 1 - (elder * mass[:, None, :]).sum(dim=2)
    accept_prob = torch.where(left > 0, mass / left, 0.0).clamp(max=1)
    place = torch.where(is_child, parents * V + tokens, N * V)  # of each child's token after its parent
    rejected = torch.cat([p.flatten(1), p.new_zeros(B, 1)], dim=1).scatter(1, place, 0.0)[:, :-1].view_as(p)
    return Verdict(torch.where(node == 0, 1.0, accept_prob), normalised(rejected, p))


def ratio(p: Tensor, q: Tensor, tokens: Tensor, family: Family) -> Verdict:
    """Apply recursive rejection to a tree: p (B, N, V), q (B, I, V), tokens (B, N).

    The test of a node is the test made if all its elder siblings were rejected. If q has fewer tokens than the node has
    children, some children have probability 0 in q. They are never accepted and change nothing.
    """
    P, Q = p[:, family.parents], q  # (B, I, V)
    accept_prob = []
    for r in range(family.children.shape[1]):
        x = tokens[:, family.children[:, r]][..., None]  # (B, I, 1)
        drawn = Q.gather(-1, x)
        tested = family.there[:, r, None] & (drawn > 0)
        accept_prob.append(torch.where(tested, quotient(P.gather(-1, x), drawn).clamp(max=1), 0.0))
        P = torch.where(tested, residual(P, Q), P)
        Q = torch.where(tested, normalised(Q.scatter(-1, x, 0.0), Q), Q)
    by_child = torch.cat(accept_prob, dim=-1).flatten(1)[:, family.place]  # (B, N - 1)
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
    # Where w = 1 and nothing exceeds q, p and q are equal: then the result of the test does not matter, nor does the
    # distribution after it.
    whole = excess + (1 - before)
    accept_prob = torch.where(whole > 0, excess / whole, 1.0)
    accept_prob = torch.cat([torch.ones_like(w[:, :1]), accept_prob[:, 1:], w[:, -1:]], dim=1)
    left = residual(before * p[:, :-1], q, otherwise=p[:, :-1])
    return Verdict(accept_prob[..., 0], torch.cat([left, p[:, -1:]], dim=1))


def quotient(p: Tensor, q: Tensor) -> Tensor:
    """Return p / q, or 0 where q is 0, which is true of no token that was drawn from q."""
    return torch.where(q > 0, p / q, 0.0)


def residual(p: Tensor, q: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Return norm(max(p - q, 0)) over the last dimension, or `otherwise` (default: p) where no mass is left. There q
    covers p, a rejection has probability 0, and any distribution is correct."""
    return normalised((p - q).clamp_min(0), p if otherwise is None else otherwise)


def normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    """Return `mass` divided by its sum over the last dimension, or `otherwise` where the sum is 0."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, otherwise)
