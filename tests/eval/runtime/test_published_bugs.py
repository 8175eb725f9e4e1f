"""Faults found in published implementations of these rules, and that this one does not have them.

Where a fault changes the distribution of what comes out, test_rejection.py also shows that its sums would tell.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.benchmark.prompts import Prompt
from eval.runtime.acceptance import DRAFTS, LAST, TESTS, Draws, Rejection, Verdict, family_of, make_rule
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling import RULES, Sampling, check_rule
from heads.backends.slot_mapping import ancestors
from heads.backends.torch.noise import gumbel, stream, uniform
from heads.backends.torch.sampling import RowSampling
from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from heads.tree import Acceptance, Proposal, TreeShape, is_chain, parse_shape, static_shape

CPU = torch.device("cpu")
SAMPLED_RULES = RULES[1:]
UNEVEN = static_shape([(0,), (1,), (1, 0)], "uneven")


def warm(rows: int, temperature: float = 1.0) -> RowSampling:
    """Rows that sample, with seeds 0, 1, 2, .."""
    sampling = RowSampling(rows)
    sampling.set_row(0, Sampling(temperature))
    sampling.temperature.fill_(temperature)
    sampling.seed.copy_(torch.arange(rows))
    return sampling


def judged(
    name: str, shape: TreeShape, tokens: list[int], p: Tensor, q: Tensor, *, rows: int = 1, position: int = 5
) -> tuple[Verdict, Acceptance]:
    """Apply a rule to a tree: p (N, V) and q (I, V), the same for every row; seeds 0, 1, 2, .."""
    rule = Rejection(name, shape, warm(rows), CPU)
    rule.draws.distributions = [q.log().expand(rows, -1, -1)]
    paths = shape.paths or tuple((0,) * n for n in range(1, shape.nodes))
    places = [(), *paths]
    parents = torch.tensor([0, *(places.index(path[:-1]) for path in paths)]).expand(rows, -1)
    depths = torch.tensor([len(path) for path in places]).expand(rows, -1)
    proposal = Proposal(torch.tensor(tokens).expand(rows, -1), parents, depths, depths.float())
    above = None if is_chain(shape) else ancestors(parents, shape.depth)
    distributions = p.expand(rows, -1, -1)
    return rule.weigh(proposal, distributions), rule.accept(proposal, distributions, position + depths, above)


def test_children_judged_by_q_were_drawn_from_q() -> None:
    """Fault: the draft's likeliest tokens are proposed, and judged by its probabilities as if they had been drawn."""
    q = torch.tensor([0.6, 0.3, 0.1])
    first = Draws(warm(20_000))(q.log().expand(20_000, 1, 3), torch.ones(20_000, 1).long(), 2)[0]
    shares = torch.bincount(first[:, 0, 0], minlength=3) / 20_000
    torch.testing.assert_close(shares, q, atol=0.015, rtol=0)


def test_siblings_never_repeat() -> None:
    """Fault: a sampler said to draw without replacement draws with it."""
    q = torch.tensor([0.5, 0.3, 0.2]).log().expand(5_000, 1, 3)
    place = torch.ones(5_000, 1, dtype=torch.int64)
    drawn = Draws(warm(5_000))(q, place, 2)[0][:, 0]
    assert (drawn[:, 0] != drawn[:, 1]).all()


@pytest.mark.parametrize("rule", RULES)
def test_the_last_token_is_chosen_as_all_others_are(
    rule: str, tiny_target: FrozenTarget, pair_head: Any, tiny_prompts: list[Prompt]
) -> None:
    """Fault: after a wholly accepted draft, or at a node without children, the token is drawn from the bare softmax,
    whatever temperature and filters were asked for. With one token left by the filter there is no choice."""
    for text in ("chain:2", "static:2.1") if rule != "block" else ("chain:2",):
        lone = [Request(list(p.ids), 12, Sampling(1.5, top_k=1, seed=9), ignore_eos=True) for p in tiny_prompts[:3]]
        greedy = [Request(list(p.ids), 12, ignore_eos=True) for p in tiny_prompts[:3]]
        engine = Engine(
            tiny_target, pair_head, EngineOptions(shape=parse_shape(text), batch_size=3, max_length=64, rule=rule)
        )
        outputs = engine.generate(lone)
        assert [o.tokens for o in outputs] == [
            o.tokens for o in Engine(tiny_target, None, EngineOptions(max_length=64)).generate(greedy)
        ]
        assert any(max(output.accepted) == 2 for output in outputs)


@pytest.mark.parametrize("name", SAMPLED_RULES)
def test_a_node_without_children_ends_in_the_targets_distribution(name: str) -> None:
    """Fault: where no candidate was left to try, the token comes from a distribution that was made for another node."""
    shape = parse_shape("chain:1") if name == "block" else UNEVEN
    p = torch.rand(shape.nodes, 4, generator=torch.Generator().manual_seed(1)).softmax(-1)
    q = p[: len(family_of(shape).parents)]
    verdict, _ = judged(name, shape, [0, 1, 2, 3][: shape.nodes], p, q)
    leaves = [j for j in range(shape.nodes) if j not in family_of(shape).parents]
    torch.testing.assert_close(verdict.rest[0, leaves], p[leaves])


@pytest.mark.parametrize("rule", RULES)
def test_the_hosts_random_numbers_have_no_say(
    rule: str, tiny_target: FrozenTarget, pair_head: Any, tiny_prompts: list[Prompt]
) -> None:
    """Fault: tests are thrown with the language's own generator, which the seed does not govern."""
    engine = Engine(tiny_target, pair_head, EngineOptions(shape=parse_shape("chain:2"), max_length=64, rule=rule))
    seen = []
    for host_seed in (1, 2):
        random.seed(host_seed)
        torch.manual_seed(host_seed)
        seen.append(engine.generate([Request(list(tiny_prompts[0].ids), 12, Sampling(1.0, seed=4))])[0].tokens)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", SAMPLED_RULES)
def test_a_token_that_the_target_excludes_is_never_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a test is passed by r <= p / q, and r may be 0."""
    monkeypatch.setattr("eval.runtime.judges.uniform", lambda *_: torch.zeros(1, 1, 2, dtype=torch.float64))
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    _, found = judged(name, parse_shape("chain:1"), [1, 0], p, torch.tensor([[0.9, 0.1]]))
    assert found.accepted.tolist() == [0] and found.emitted[0, 0] == 1


@pytest.mark.parametrize("rule", RULES)
def test_the_first_token_is_sampled_too(
    rule: str, tiny_target: FrozenTarget, pair_head: Any, tiny_prompts: list[Prompt]
) -> None:
    """Fault: the token that follows the prompt, or each round's root, is the likeliest whatever the temperature."""
    requests = [Request(list(tiny_prompts[0].ids), 2, Sampling(1.0, seed=i), ignore_eos=True) for i in range(12)]
    engine = Engine(
        tiny_target, pair_head, EngineOptions(shape=parse_shape("chain:2"), batch_size=12, max_length=64, rule=rule)
    )
    first = [output.tokens[0] for output in engine.generate(requests)]
    assert first == [
        output.tokens[0] for output in Engine(tiny_target, None, EngineOptions(max_length=64)).generate(requests)
    ]
    assert len(set(first)) > 6


@pytest.mark.parametrize("name", ["ratio", "block"])
def test_a_refused_candidate_gets_no_second_chance(name: str) -> None:
    """Fault: after a mismatch the next token is drawn anew from p, so that a candidate comes out with p (2 - p)."""
    p, q = torch.tensor([0.3, 0.7]), torch.tensor([1.0, 0.0])
    rows = 20_000
    _, found = judged(name, parse_shape("chain:1"), [1, 0], p.expand(2, 2), q[None], rows=rows)
    refused = found.accepted == 0
    assert (found.emitted[refused, 0] == 1).all()
    assert abs(float((found.emitted[:, 0] == 0).double().mean()) - 0.3) < 0.015


def test_paths_through_one_node_share_the_targets_choice_there() -> None:
    """Fault: each path of a tree draws the target's choices for itself, so that a shared node has several chances."""
    sampling = warm(1)
    logits = torch.randn(1, 1, 9, generator=torch.Generator().manual_seed(0)).expand(1, 200, 9)
    assert len(sampling.choose(logits, torch.full((1, 200), 7)).unique()) == 1


@pytest.mark.parametrize("name", ["match", "ratio"])
def test_a_token_of_id_0_is_no_padding(name: str) -> None:
    """Fault: uneven trees are filled up with token 0, which then matches where the target chooses token 0."""
    p = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])  # below the root: all on 0
    paths = [(), *(UNEVEN.paths or ())]
    parents, depths = torch.tensor([[0, 0, 0, 2]]), torch.tensor([[len(path) for path in paths]])
    for tokens, deepest in (([0, 1, 2, 1], 1), ([0, 1, 2, 0], 2)):
        proposal = Proposal(torch.tensor([tokens]), parents, depths, depths.float())
        above = ancestors(parents, 2)
        for row in range(30):
            sampling = RowSampling(1)
            sampling.set_row(0, Sampling(1.0, seed=row))
            rule = make_rule(name, UNEVEN, sampling, CPU)
            if isinstance(rule, Rejection):
                rule.draws.distributions = [torch.tensor([[[0.0, 0.5, 0.5], [1 / 3, 1 / 3, 1 / 3]]]).log()]
            found = rule.accept(proposal, rule.consult(p.log()[None], 1 + depths), 1 + depths, above)
            n = int(found.accepted[0])
            path = found.path[0, : n + 1].tolist()
            assert path in ([0, 1], [0, 2], [0, 2, 3][: deepest + 1])
            assert found.emitted[0, n] == 0  # what follows any node below the root
            assert [tokens[j] for j in path[1:]] == found.emitted[0, :n].tolist()


@pytest.mark.parametrize("name", ["typical", "threshold", "synthetic", "fly", "Match", ""])
def test_there_is_no_rule_that_bends_the_distribution(name: str) -> None:
    """Fault: modes that accept what is likely enough, or a set share, stand beside the exact ones."""
    with pytest.raises(UserError, match="expected one of match, ratio, block"):
        check_rule(name, parse_shape("chain:2"))


def test_noise_is_fine_enough_for_rare_tokens() -> None:
    """Fault: uniform numbers of 11 bits, so that what is drawn is not q, and rare tokens never are."""
    place = torch.zeros(1, 1, dtype=torch.int64)
    draws = uniform(torch.tensor([3]), place, torch.arange(200_000)).flatten()
    assert len(draws.unique()) == 200_000
    q = torch.tensor([1 - 2e-5, 2e-5])
    rows = 500_000
    drawn = Draws(warm(rows))(q.log().expand(rows, 1, 2), torch.ones(rows, 1).long(), 1)[0]
    assert 1 <= int(drawn.sum()) <= 30  # ten are expected


@pytest.mark.parametrize("name", SAMPLED_RULES)
@pytest.mark.parametrize("other", [[0.25, 0.25, 0.5], [0.25, 0.25, 0.5 + 1e-7]])
def test_a_draft_that_agrees_with_the_target_leaves_no_nan(name: str, other: list[float]) -> None:
    """Fault: where p = q nothing is left of p - q, and the distribution after a refusal is 0 / 0."""
    p, q = torch.tensor([0.25, 0.25, 0.5]).expand(3, 3), torch.tensor(other).expand(2, 3)
    verdict, found = judged(name, parse_shape("chain:2"), [0, 1, 2], p, q, rows=500)
    assert torch.isfinite(verdict.rest).all() and torch.isfinite(verdict.odds).all()
    assert (found.accepted == 2).all()


def test_every_test_has_a_number_of_its_own() -> None:
    """Fault: the generator is seeded before every test, so that all of a request's tests have one outcome."""
    roots = torch.arange(50).expand(8, 50)
    thrown = uniform(stream(torch.arange(8), TESTS), roots, torch.arange(6))
    assert len(thrown.unique()) == 8 * 50 * 6


def test_the_streams_of_noise_know_nothing_of_each_other() -> None:
    """Fault: the draft is drawn by the noise that then judges it, so that it is accepted too often or too rarely."""
    seeds = torch.arange(4)
    place = torch.arange(50).expand(4, 50)
    streams = [seeds, *(stream(seeds, purpose) for purpose in (DRAFTS, TESTS, LAST))]
    noise = torch.stack([gumbel(s, place, torch.arange(400)).flatten() for s in streams])
    assert (torch.corrcoef(noise) - torch.eye(4)).abs().max() < 0.02


@pytest.mark.parametrize("name", SAMPLED_RULES)
def test_a_wholly_accepted_draft_is_followed_by_a_token_of_the_targets(name: str) -> None:
    """Fault: when every drafted token was accepted, the target's own next token is dropped."""
    p = torch.eye(4)[[1, 2, 3, 0]]  # 0 is followed by 1, 2, 3 and 0 again
    _, found = judged(name, parse_shape("chain:3"), [0, 1, 2, 3], p, p[:3])
    assert found.accepted.tolist() == [3] and found.emitted.tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("name", SAMPLED_RULES)
def test_token_0_can_come_out(name: str) -> None:
    """Fault: a drawn token of id 0 is taken for a failure."""
    p = torch.tensor([1.0, 0.0]).expand(3, 2)
    _, found = judged(name, parse_shape("chain:2"), [0, 0, 0], p, p[:2])
    assert found.accepted.tolist() == [2] and found.emitted.tolist() == [[0, 0, 0]]
    certain, place = torch.tensor([[[50.0, 0.0, 0.0]]]), torch.tensor([[4]])
    assert warm(1).choose(certain, place).item() == warm(1).pick(certain, place, 1)[0].item() == 0


def test_what_is_left_of_q_is_precise_after_its_likeliest_token() -> None:
    """Fault: q is renormalised by one minus a running sum in 11 bits, which is 0 or wildly off once a likely token is
    gone."""
    rest = 1e-6
    q = torch.tensor([1 - 4 * rest, 3 * rest, rest])
    p = torch.tensor([0.4, 0.2, 0.4])
    shape = parse_shape("static:2")
    verdict, _ = judged("ratio", shape, [0, 0, 1], p.expand(3, 3), q[None])
    left = (p[1] - q[1]) / (p[1] - q[1] + p[2] - q[2])
    assert verdict.odds[0, 2] == pytest.approx(float(left / 0.75), rel=1e-3)
