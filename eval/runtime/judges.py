"""The acceptance rules at work: they draw a round's drafts and decide which of them are kept.

`match` is `eval.runtime.acceptance`, the others are `eval.runtime.rejection`. At temperature 0 all are one rule. Above
it the last two need q, the very distribution that a draft token was drawn from: the draft's logits under the same
temperature, top-k, top-p and min-p as the target's, over the full vocabulary. So they refuse drafts that draw from no
distribution, and trees in which it depends on the draws who stays: the distribution of what survives a reranking is not
q.

Their noise is counter-based as `match`'s is, in four streams that know nothing of each other: the drafts', the tests',
the last token's, and `match`'s own, which chooses a request's first token. None may be shared, and none is keyed by
position alone: `block` refuses a whole chain for what its last tokens are, so that a token not emitted still says
something of the noise at its position. The root's position, which no two rounds of a request share, is in every key.

Letters: B rows, N nodes, W nodes drawn for at once, R children, I nodes that have children, V vocabulary, Vx columns of
a draft's logits.
"""

from typing import Protocol

import torch
from torch import Tensor

from eval.runtime.acceptance import match, match_by_kernel, match_chain
from eval.runtime.distribution import RowSampling, gumbel
from eval.runtime.rejection import Verdict, block, family_of, first_accepted, last_accepted, leading, ratio
from eval.runtime.rules import check_rule
from heads.backends.torch.noise import stream, uniform
from heads.backends.triton.runtime import runs_kernels
from heads.errors import UserError
from heads.tree import MOST_NODES, Acceptance, Pick, Proposal, TreeShape

DRAFTS, TESTS, LAST = 0x3C79AC492BA7B653, 0x1CE4E5B9BF58476D, 0x14D049BB133111EB
"""Numbers of the streams by purpose; any three distinct ones."""


class Rule(Protocol):
    """Interface of an acceptance rule to a round."""

    needs_distribution: bool
    """True if the rule needs the target's whole distribution; else the target's choices are enough for `consult`."""

    def begin(self) -> Pick:
        """Return the function that draws this round's drafts."""

    def consult(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Process the target's output for each node: logits (B, N, V); positions (B, N) of the tokens that follow."""

    def accept(self, proposal: Proposal, consulted: Tensor, positions: Tensor, above: Tensor | None) -> Acceptance:
        """Judge the drafts; above (B, N, N) is `heads.backends.slot_mapping.ancestors`, None for a chain."""


def make_rule(name: str, shape: TreeShape, sampling: RowSampling, device: torch.device) -> Rule:
    """Return the rule of that name for trees of one shape. UserError if there is none."""
    check_rule(name, shape)
    return Match(shape, sampling) if name == "match" else Rejection(name, shape, sampling, device)


class Match:
    """The rule `match`, by the target's own choices."""

    needs_distribution = False

    def __init__(self, shape: TreeShape, sampling: RowSampling) -> None:
        self.shape, self.sampling = shape, sampling

    def begin(self) -> Pick:
        return self.sampling.pick

    def consult(self, logits: Tensor, positions: Tensor) -> Tensor:
        return self.sampling.choose(logits, positions)  # (B, N)

    def accept(self, proposal: Proposal, consulted: Tensor, positions: Tensor, above: Tensor | None) -> Acceptance:
        if self.shape.nodes == 1:  # a root alone emits the target's choice
            return Acceptance(proposal.depths[:, 0], proposal.depths, consulted)  # zeros
        if runs_kernels(consulted):
            return match_by_kernel(proposal, consulted, self.shape.depth)
        if above is None:
            return match_chain(proposal.tokens, consulted)
        return match(proposal, consulted, above, self.shape.depth)


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
            noise = gumbel(
                stream(sampling.seed, DRAFTS), draw_counters(positions, len(self.distributions)), ids
            )  # (B, W, Vx)
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


class Rejection:
    """The rules `ratio` and `block`, by the two distributions."""

    needs_distribution = True

    def __init__(self, name: str, shape: TreeShape, sampling: RowSampling, device: torch.device) -> None:
        self.name, self.shape, self.sampling = name, shape, sampling
        self.family = family_of(shape, device)
        self.draws = Draws(sampling)

    def begin(self) -> Pick:
        self.draws = Draws(self.sampling)
        return self.draws

    def consult(self, logits: Tensor, positions: Tensor) -> Tensor:
        return self.sampling.log_distribution(logits).exp()  # (B, N, V)

    def accept(self, proposal: Proposal, consulted: Tensor, positions: Tensor, above: Tensor | None) -> Acceptance:
        verdict = self.weigh(proposal, consulted)
        device, seed = positions.device, self.sampling.seed
        root = positions[:, :1] - 1
        node = torch.arange(self.shape.nodes, device=device)
        passed = uniform(stream(seed, TESTS), root, node)[:, 0] < verdict.odds
        accepted, path = self.decide(passed, proposal, above)
        end = path.gather(1, accepted[:, None])  # (B, 1)
        rest = verdict.rest.gather(1, end[..., None].expand(-1, -1, verdict.rest.shape[2]))  # (B, 1, V)
        noise = gumbel(stream(seed, LAST), root, torch.arange(rest.shape[2], device=device))
        last = (rest.log() + noise).argmax(dim=-1)  # (B, 1)
        drafted = proposal.tokens.gather(1, path).roll(
            -1, dims=1
        )  # at the last place padding, which only `last` covers
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
