"""The rules as they run: drawn by their own noise they give the target's distribution, and at temperature 0 its very
tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.acceptance_rules import DRAFTS, LAST, TESTS, Draws, Rejection, Rule, draw_counters, make_rule
from eval.runtime.distribution import RowSampling
from eval.runtime.engine import Request
from eval.runtime.sampling_params import RULES, Sampling, check_rule
from heads.core.contract import Drafter, Observation
from heads.core.tree import Pick, Proposal, TreeShape, parse_shape, static_shape
from heads.kernels.gumbel import gumbel, stream, uniform
from heads.kernels.slots import ancestors
from heads.parts.tree_growth import grow
from tests.eval.runtime.conftest import target_of
from tests.support.enumeration import Toy, chi_square, prefixes_of
from tests.support.refusals import refused
from tests.support.small_targets import make_drafter, open_engine


def sampled_rows(rows: int, sampling: Sampling) -> RowSampling:
    """Rows of one sampling, each with a seed of its own."""
    batch = RowSampling(rows)
    batch.set_row(0, sampling)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        getattr(batch, name).fill_(getattr(sampling, name))
    batch.seed.copy_(torch.arange(rows) + sampling.seed)
    return batch


DECODED = 4
"""Tokens whose joint distribution is looked at."""
TARGET: Any = SimpleNamespace(in_tiles=False, logits=lambda hidden: hidden)
"""A target whose hidden states are its logits."""


class Decoding:
    """Rounds of a rule over a toy's distributions, for many rows at once: what the runtime does, without a model."""

    def __init__(self, toy: Toy, rule: str, text: str, sampling: RowSampling) -> None:
        self.toy, self.shape, self.sampling = toy, parse_shape(text), sampling
        self.rule: Rule = make_rule(rule, self.shape, sampling, TARGET)
        self.p, starts = toy.flat("p")
        self.q, _ = toy.flat("q")
        self.starts = torch.tensor(starts)
        rows = len(sampling.seed)
        self.length = torch.zeros(rows, dtype=torch.int64)
        self.codes = torch.zeros(rows, dtype=torch.int64)  # what was decoded, a number in base V
        self.rounds = torch.zeros(rows, dtype=torch.int64)

    def logits(self, table: Tensor, depths: Tensor, codes: Tensor) -> Tensor:
        return table[self.starts[depths] + codes].float()

    def round(self) -> None:
        """One round of every row that has not decoded enough."""
        V, shape = self.toy.vocab, self.shape
        going = self.length < DECODED
        codes = self.codes[:, None]
        depths = self.length[:, None]

        def expand(tokens: Tensor, above: Tensor, paths: Tensor, level: int) -> Tensor:
            nonlocal codes
            codes = codes.gather(1, above) * V + tokens
            return self.logits(self.q, depths + level, codes)

        root = torch.zeros_like(self.length)
        first = self.logits(self.q, depths, codes)
        proposal = grow(shape, root, self.length, first, self.rule.begin(), expand, None)
        prefixes = prefixes_of(proposal, V, self.codes)
        logits = self.logits(self.p, depths + proposal.depths, prefixes)
        positions = self.length[:, None] + 1 + proposal.depths
        outputs = self.rule.target_outputs(logits, positions)
        tree = None if shape.top_k == 1 else ancestors(proposal.parents, shape.depth)
        found = self.rule.accept(proposal, outputs, positions, tree)
        for k in range(shape.depth + 1):
            takes = going & (k <= found.accepted) & (self.length < DECODED)
            self.codes = torch.where(takes, self.codes * V + found.emitted[:, k], self.codes)
            self.length = self.length + takes
        self.rounds += going


WARM = Sampling(temperature=1.0, seed=1)
FILTERED = Sampling(temperature=0.6, top_p=0.9, seed=50)


@pytest.mark.parametrize(
    ("rule", "text", "sampling"),
    [
        *(("match", "tree:2x2x4", WARM), ("block", "chain:3", WARM)),
        *(("ratio", "chain:2", FILTERED), ("ratio", "static:2.2", FILTERED)),
    ],
    ids=["match", "block", "ratio", "ratio, tree"],
)
def test_several_rounds_by_real_noise_have_the_targets_distribution(rule: str, text: str, sampling: Sampling) -> None:
    distributions = Toy(3, DECODED + parse_shape(text).depth, 21)
    batch = sampled_rows(30_000, sampling)
    decoding = Decoding(distributions, rule, text, batch)
    while (decoding.length < DECODED).any():
        decoding.round()
    processed = [batch.row(0).log_distribution(table.log()[None]).exp()[0].double() for table in distributions.p]
    distributions.p = [table / table.sum(-1, keepdim=True) for table in processed]
    statistic, limit = chi_square(decoding.codes, distributions.distribution(DECODED))
    assert statistic < limit
    assert decoding.rounds.double().mean() < 0.85 * DECODED


def test_children_are_drawn_from_the_drafts_distribution_in_order() -> None:
    q, V, rows = torch.tensor([0.55, 0.25, 0.15, 0.05]), 4, 60_000
    draws = Draws(sampled_rows(rows, Sampling(temperature=1.0)))
    children, logp = draws(q.log().expand(rows, 2, V), torch.full((rows, 2), 9), 2)
    torch.testing.assert_close(logp, q.log()[children])
    first, second = children.unbind(-1)  # (rows, 2 nodes)
    pairs = (q.outer(q) / (1 - q)[:, None]).fill_diagonal_(0.0)
    for node in range(2):
        statistic, limit = chi_square(first[:, node] * V + second[:, node], pairs.double().flatten())
        assert statistic < limit
    statistic, limit = chi_square(first[:, 0] * V + first[:, 1], q.outer(q).double().flatten())
    assert statistic < limit, "the draws of two nodes know nothing of each other"


def test_no_two_draws_of_a_request_have_one_counter() -> None:
    places = [(torch.full((1, 7), root + level), level) for root in range(40) for level in range(1, 6)]
    seen = torch.cat([draw_counters(positions, level).flatten() for positions, level in places])
    assert len(seen.unique()) == len(seen) == 40 * 5 * 7


def test_greedy_rows_use_every_sibling() -> None:
    target = target_of("llama")
    requests = [Request([5 + n, 6, 7], 12, Sampling(temperature=float(n % 2)), ignore_eos=True) for n in range(6)]
    rounds = []
    for rule in RULES[:2]:
        head = make_drafter("early_exit:2", target)
        outputs = open_engine(target, head, "static:3.2", batch_size=2, max_length=96, rule=rule).generate(requests)
        rounds.append([output.rounds for output in outputs][::2])
    assert rounds[0] == rounds[1] and sum(rounds[0]) < 3 * 11


def test_what_many_requests_give_by_block_has_the_targets_distribution() -> None:
    """Through the whole engine: with two tokens to choose from, three tokens come out in eight ways."""
    target, prompt = target_of("llama"), [5, 6, 7]
    requests = [Request(prompt, 3, Sampling(temperature=1.0, top_k=2, seed=i), ignore_eos=True) for i in range(250)]
    head = make_drafter("early_exit:2", target)
    engine = open_engine(target, head, "chain:2", batch_size=50, max_length=32, rule="block")
    outputs = [tuple(output.tokens) for output in engine.generate(requests)]
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, mass in distribution.items():
            logits = target.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
            values, ids = logits.topk(2)
            longer.update({(*tokens, int(i)): mass * float(p) for i, p in zip(ids, values.softmax(-1), strict=True)})
        distribution = longer
    ways = list(distribution)
    codes = torch.tensor([ways.index(tokens) for tokens in outputs])
    statistic, limit = chi_square(codes, torch.tensor([distribution[way] for way in ways], dtype=torch.float64))
    assert statistic < limit


GAPPED = static_shape([(0,), (2,), (0, 0)], "gapped")


@pytest.mark.parametrize(
    ("rule", "shape", "words"),
    [
        ("typical", parse_shape("chain:2"), "expected one of match, ratio, block"),
        ("ratio", parse_shape("tree:3x2x5"), "the distribution of what survives"),
        ("block", parse_shape("static:2.2"), "judges chains, not the tree static:2.2"),
        ("ratio", GAPPED, "node (2,) without its elder sibling, rank 1"),
    ],
)
def test_a_rule_that_cannot_judge_a_tree_says_why(rule: str, shape: TreeShape, words: str) -> None:
    assert words in refused(check_rule, rule, shape)
    check_rule("ratio", static_shape([(0,), (1,), (1, 0)], "uneven"))


class Copying(Drafter):
    """A draft that asks for no draw: it has no distribution."""

    def new_state(self, shared: Any, *, batch_size: int, capacity: int, shape: Any) -> int:
        return batch_size

    def reset_rows(self, state: int, rows: Tensor) -> None: ...

    def extend(self, state: int, observation: Observation) -> None: ...

    def propose(self, state: int, pick: Pick) -> Proposal:
        chain = torch.arange(3).expand(state, -1)
        return Proposal(chain, (chain - 1).clamp_min(0), chain, chain.float())


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_draft_without_a_distribution_is_refused_by_rules_that_need_one(rule: str) -> None:
    engine = open_engine(target_of("llama"), Copying(), "chain:2", max_length=32, rule=rule)
    fault = refused(engine.generate, [Request([5, 6], 8, Sampling(temperature=1.0))])
    assert f"rule {rule} needs the distribution that the draft was drawn from" in fault


# Faults of published implementations that the sums of test_rejection.py do not show.


def test_every_test_has_a_number_of_its_own_and_streams_know_nothing_of_each_other() -> None:
    """Faults: the generator is seeded before every test, so that all of a request's tests have one outcome; the draft
    is drawn by the noise that then judges it."""
    tests = uniform(stream(torch.arange(8), TESTS), torch.arange(50).expand(8, 50), torch.arange(6))
    assert len(tests.unique()) == 8 * 50 * 6
    seeds, place = torch.arange(4), torch.arange(50).expand(4, 50)
    streams = [seeds, *(stream(seeds, purpose) for purpose in (DRAFTS, TESTS, LAST))]
    noise = torch.stack([gumbel(s, place, torch.arange(400)).flatten() for s in streams])
    assert (torch.corrcoef(noise) - torch.eye(4)).abs().max() < 0.02


def verdict_on(name: str, text: str, tokens: list[int], p: Tensor, q: Tensor) -> Any:
    """The verdict in float32 on a tree whose parents are 0 or the node before; p (N, V), q (I, V)."""
    rule = Rejection(name, parse_shape(text), sampled_rows(1, Sampling(temperature=1.0)), TARGET)
    rule.draws.distributions = [q.log()[None]]
    node = torch.arange(len(tokens))[None]
    parents = (node - 1).clamp_min(0) if text.startswith("chain") else torch.zeros_like(node)
    return rule.accept_probs(Proposal(torch.tensor([tokens]), parents, node, node.float()), p[None])


@pytest.mark.parametrize("name", ["ratio", "block"])
@pytest.mark.parametrize("other", [[0.25, 0.25, 0.5], [0.25, 0.25, 0.5 + 1e-7]])
def test_a_draft_that_agrees_with_the_target_leaves_no_nan(name: str, other: list[float]) -> None:
    """Fault: where p = q nothing is left of p - q, and the distribution after a refusal is 0 / 0."""
    p, q = torch.tensor([0.25, 0.25, 0.5]).expand(3, 3), torch.tensor(other).expand(2, 3)
    verdict = verdict_on(name, "chain:2", [0, 1, 2], p, q)
    assert torch.isfinite(verdict.residual).all() and (verdict.accept_prob > 1 - 1e-6).all()


def test_what_is_left_of_q_is_precise_after_its_likeliest_token() -> None:
    """Fault: q is renormalised by one minus a running sum in 11 bits, which is 0 or wildly off once a likely token is
    gone."""
    q, p = torch.tensor([1 - 4e-6, 3e-6, 1e-6]), torch.tensor([0.4, 0.2, 0.4])
    verdict = verdict_on("ratio", "static:2", [0, 0, 1], p.expand(3, 3), q[None])
    left = (p[1] - q[1]) / (p[1] - q[1] + p[2] - q[2])
    assert verdict.accept_prob[0, 2] == pytest.approx(float(left / 0.75), rel=1e-3)
