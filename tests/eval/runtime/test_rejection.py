"""The rules that reject, on every kind of tree: what comes out, summed over all that can happen, has the target's
distribution."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.acceptance_rules import Rejection, Verdict
from eval.runtime.distribution import RowSampling
from heads.blocks.block_heads import BLOCK_HEADS
from heads.core.contract import Observation, SharedLayers
from heads.core.tree import Proposal, TreeShape, parse_shape, static_shape
from tests.support.annotations import Patch
from tests.support.enumeration import EveryDraw, Toy, draws_of, prefixes_of, sum_over_tests
from tests.support.small_heads import BLOCK_SIZES

EXACT = 1e-9
NO_TARGET: Any = None
PATHS = {"uneven": [(0,), (1,), (0, 0), (0, 1), (1, 0)], "deep": [(0,), (1,), (1, 0), (1, 0, 0)]}
STATIC = [parse_shape("static:2.2"), parse_shape("static:3.1"), *(static_shape(PATHS[name], name) for name in PATHS)]
CHAIN = parse_shape("chain:3")
accept_probs = Rejection.accept_probs


def outcome(toy: Toy, shape: TreeShape, rule: str, *, likeliest: bool = False) -> tuple[Tensor, float]:
    """The distribution (V^(K+1),) of what comes out, continued by the target, and the tokens expected of a round.

    `likeliest`: the draft is not drawn, but the best children that there are.
    """
    K = shape.depth
    pick: Any = EveryDraw(draws_of(shape) if rule != "likeliest" else [], toy.vocab)
    sampling = RowSampling(len(pick.ways))
    sampling.temperature.fill_(1.0)
    judging = Rejection(rule, shape, sampling, NO_TARGET)
    proposal, prefixes = toy.grow(shape, judging.begin() if rule == "likeliest" else pick, len(pick.ways))
    drawn = pick.likeliest if likeliest else pick.weight
    assert abs(drawn.sum() - 1) < EXACT
    judging.draws = pick
    verdict = judging.accept_probs(proposal, toy.at(prefixes, proposal.depths))
    assert ((verdict.accept_prob >= 0) & (verdict.accept_prob <= 1)).all() and (verdict.residual >= 0).all()
    torch.testing.assert_close(verdict.residual.sum(-1), torch.ones_like(verdict.residual[..., 0]))
    parts = sum_over_tests(judging, proposal, verdict, prefixes, drawn)
    tokens = sum(float(part.sum()) * (n + 1) for n, part in enumerate(parts))
    return torch.stack([toy.complete(part.flatten(), K + 1) for part in parts]).sum(0), tokens


def distance(toy: Toy, distribution: Tensor, shape: TreeShape) -> float:
    return float((distribution - toy.distribution(shape.depth + 1)).abs().max())


def check_exact(toy: Toy, shape: TreeShape, rule: str) -> float:
    """Check that the target's distribution comes out, and return the tokens expected of a round."""
    distribution, tokens = outcome(toy, shape, rule)
    assert distance(toy, distribution, shape) < EXACT
    assert 1 < tokens <= shape.depth + 1 + EXACT
    return tokens


@pytest.mark.parametrize("support", [None, 2, 1])
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_chains_have_the_targets_distribution(rule: str, vocab: int, support: int | None) -> None:
    for seed in range(4):
        assert check_exact(Toy(vocab, 4, seed, support), CHAIN, rule) <= 4


class Copied(Toy):
    """A draft that a lookup copied, in the place of one that was drawn or, with `skipped`, of none."""

    skipped = False

    def grow(self, shape: TreeShape, pick: Any, rows: int) -> tuple[Proposal, Tensor]:
        drawn, _ = super().grow(shape, pick, rows)
        if self.skipped:
            pick.distributions.clear()
        tokens = torch.tensor([0, 2, 0, 2]).expand(rows, -1)
        copied = replace(drawn, tokens=tokens, copied=torch.ones(rows, dtype=torch.bool))
        return copied, prefixes_of(copied, self.vocab, tokens[:, 0])


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_copied_chains_have_the_targets_distribution(rule: str, skipped: bool) -> None:
    for seed in range(4):
        distributions = Copied(3, 4, seed)
        distributions.skipped = skipped
        assert check_exact(distributions, CHAIN, rule) < 4


def expected_of_likeliest(toy: Toy, depth: int) -> float:
    """The tokens of a round: draft token k is accepted with the target's probability of it, if all before it were."""
    prefix = 0
    reached = expected = 1.0
    for p, q in zip(toy.p[:depth], toy.q[:depth], strict=True):
        token = int(q[prefix].argmax())
        reached *= float(p[prefix, token])
        expected += reached
        prefix = prefix * toy.vocab + token
    return expected


@pytest.mark.parametrize("shape", [CHAIN, *STATIC, parse_shape("tree:3x2x6")], ids=str)
def test_the_likeliest_tokens_leave_the_targets_distribution_in_any_tree(shape: TreeShape) -> None:
    """The first is accepted with the target's probability of it, as vLLM does by default."""
    for support in (None, 1):
        toy = Toy(3, shape.depth + 1, 7, support)
        tokens = check_exact(toy, shape, "likeliest")
        assert 1 + float(toy.p[0][0, toy.q[0].argmax()]) - EXACT <= tokens <= shape.depth + 1
        if shape is CHAIN:
            assert abs(tokens - expected_of_likeliest(toy, shape.depth)) < EXACT


@pytest.mark.parametrize("support", [None, 2, 1])  # 1: siblings that q cannot have given
@pytest.mark.parametrize("shape", STATIC, ids=str)
def test_static_trees_have_the_targets_distribution(shape: TreeShape, support: int | None) -> None:
    assert check_exact(Toy(3, shape.depth + 1, 7, support), shape, "ratio") <= shape.depth + 1


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_draft_with_the_targets_own_distribution_is_accepted_whole(rule: str) -> None:
    distributions = Toy(3, 4, 2)
    distributions.q = distributions.p
    assert check_exact(distributions, CHAIN, rule) == pytest.approx(4)


def test_block_emits_no_fewer_tokens_than_ratio_in_expectation() -> None:
    gains = []
    for seed in range(40):
        distributions = Toy(3, 4, 100 + seed, support=(None, 2)[seed % 2])
        tokens = [outcome(distributions, CHAIN, rule)[1] for rule in ("block", "ratio")]
        gains.append(tokens[0] / tokens[1])
    assert min(gains) > 1 - EXACT
    assert sum(gains) / len(gains) > 1.02


def fresh_draw(rule: Rejection, proposal: Proposal, p: Tensor) -> Verdict:
    """A fault: after a refusal the token is drawn anew from p, as if nothing had been refused."""
    return Verdict(accept_probs(rule, proposal, p).accept_prob, p)


@pytest.mark.parametrize(("rule", "shape"), [("ratio", "chain:3"), ("block", "chain:3"), ("ratio", "static:2.2")])
def test_the_sums_tell_a_wrong_rule_and_a_draft_that_was_not_drawn(rule: str, shape: str, monkeypatch: Patch) -> None:
    distributions, tree = Toy(3, parse_shape(shape).depth + 1, 3), parse_shape(shape)
    assert distance(distributions, outcome(distributions, tree, rule, likeliest=True)[0], tree) > 0.02
    monkeypatch.setattr(Rejection, "accept_probs", fresh_draw)
    assert distance(distributions, outcome(distributions, tree, rule)[0], tree) > 0.002


D, V = 8, 3
SETTINGS: dict[str, Any] = BLOCK_SIZES | dict(
    hidden_size=D, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, vocab_size=V,
    num_target_layers=4, aux_layer_ids=(2,), mask_token_id=2, num_layers=1,
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "dflash": {},
    # Of three tokens it chooses among two: q is 0 at the third.
    "dflash2": dict(conv_group_size=4, selector_rank=4, selector_top_k=2),
    "dspark": dict(markov_rank=4),
    "lilicorr": dict(lilicorr_candidate_topk=2, lilicorr_num_heads=2, lilicorr_factor_dim=4),
    "xpress": dict(xpress_rank=4, xpress_mlp_hidden=6, xpress_topc=2),
    "domino": dict(gru_hidden_dim=4, emb_dim=4),
}
"""Settings of their own."""


class Drafted(Toy):
    """The target's distributions of a toy, and the drafts of a random head in the place of the toy's."""

    def __init__(self, kind: str, depth: int) -> None:
        super().__init__(V, depth + 1, 7)
        torch.manual_seed(3)
        head: Any = BLOCK_HEADS[kind]
        self.head = head(head.Config(**SETTINGS | OWN[kind])).double()
        for parameter in self.head.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.7)

    def grow(self, shape: TreeShape, pick: Any, rows: int) -> tuple[Proposal, Tensor]:
        torch.manual_seed(4)
        table, out = torch.randn(2, V, D, dtype=torch.float64)
        shared = SharedLayers(lambda ids: table[ids], lambda hidden: hidden @ out.T, out)
        state = self.head.new_state(shared, batch_size=rows, capacity=16, shape=shape)
        known = torch.randn(5, D, dtype=torch.float64).expand(rows, -1, -1)
        ids = torch.zeros(rows, 6, dtype=torch.int64)
        count = torch.full((rows,), 5)
        self.head.extend(state, Observation(ids, known, known, torch.zeros_like(count), count, None))
        proposal = self.head.propose(state, lambda logits, *rest: pick(logits.log_softmax(-1), *rest))
        return proposal, prefixes_of(proposal, V, ids[:, 0])


@pytest.mark.parametrize(("rule", "shape"), [("ratio", "chain:3"), ("block", "chain:3"), ("ratio", "static:2.2")])
@pytest.mark.parametrize("kind", BLOCK_HEADS)
def test_drafted_blocks_have_the_targets_distribution(kind: str, rule: str, shape: str) -> None:
    tree = parse_shape(shape)
    assert check_exact(Drafted(kind, tree.depth), tree, rule) <= tree.depth + 1
