"""The audit of a text that differs: given token by token, and what counts as a near-tie."""

import math
from typing import Any

import pytest
import torch

from eval.runtime.acceptance_rules import Match
from eval.runtime.engine import Request
from eval.runtime.near_ties import FAR, NEAR, Edges, Mismatch, check_near_ties, find_mismatches, mismatches_of_rounds
from eval.runtime.sampling_params import Sampling
from heads.registry import build_untrained
from heads.targets.frozen_target import FrozenTarget
from tests.eval.runtime.conftest import target_of
from tests.support.annotations import Patch
from tests.support.small_targets import make_target, open_engine, texts

WIDE: Any = dict(vocab_size=512, hidden_size=128, intermediate_size=256, initializer_range=0.1)


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        *(("llama", Sampling()), ("qwen3_next", Sampling()), ("t5", Sampling())),
        *(("llama", Sampling(temperature=0.9)), ("llama", Sampling(temperature=0.8, top_k=9, top_p=0.9))),
        ("llama", Sampling(repetition_penalty=1.5, frequency_penalty=1.0)),
        ("llama", Sampling(temperature=0.9, presence_penalty=2.0)),
    ],
)
def test_plain_decodings_own_texts_have_no_mismatch_and_a_changed_token_is_one(family: str, sampling: Sampling) -> None:
    """Of several texts together, of more texts than the engine has rows, of any lengths, and one by one."""
    target = target_of(family)
    ends = [] if target.start_token is None else [1, target.start_token]
    prompts = [[*[5, 6, 7][: 1 + i % 3], *ends] for i in range(5)]
    requests = [Request(ids, 12 - 4 * (i == 3), sampling.with_seed(i), (), True) for i, ids in enumerate(prompts)]
    engine = open_engine(target, build_untrained("lookup:3", target), "chain:3", batch_size=2, max_length=64)
    plainly = texts(engine.generate(requests))
    changed = [[*text[:6], (text[6] + 1) % 61, *text[7:]] for text in plainly]

    def both(made: list[list[int]]) -> list[list[list[Mismatch]]]:
        given = list(zip(requests, made, strict=True))
        return [find_mismatches(target, given), mismatches_of_rounds(engine, given)]

    assert both(plainly) == [[[]] * 5] * 2
    own, rounds = both(changed)
    for n, (first, *_) in enumerate(own):
        assert (first.position, first.token, first.chosen) == (6, changed[n][6], plainly[n][6])
        assert first.gap > 0 and not first.is_within(FAR)
        assert find_mismatches(target, [(requests[n], changed[n])]) == [own[n]]
        assert [each.position for each in rounds[n]] == [each.position for each in own[n]]
        assert [each.gap for each in rounds[n]] == pytest.approx([each.gap for each in own[n]], rel=1e-3)
    for wrong in both([[(text[0] + 1) % 61, *text[1:]] for text in plainly]):
        assert all(found[0].position == 0 and not found[0].is_within(FAR) for found in wrong)


def test_the_gap_is_that_of_the_logits() -> None:
    target = target_of("llama")
    request = Request([5, 6, 7], 3, ignore_eos=True)
    engine = open_engine(target, build_untrained("lookup:3", target), "chain:2", max_length=64)
    tokens = engine.generate([request])[0].tokens
    wrong = (tokens[2] + 1) % 61
    ((mismatch,),) = find_mismatches(target, [(request, [*tokens[:2], wrong])])
    logits = target.model(torch.tensor([[5, 6, 7, *tokens[:2]]])).logits[0, -1]
    assert mismatch.gap == pytest.approx(float(logits[tokens[2]] - logits[wrong]), rel=1e-5)


def test_two_units_in_the_last_place_are_near() -> None:
    assert [Mismatch(3, 1, 2, gap=gap, ulp=0.125).is_within(NEAR) for gap in (0.25, 0.26)] == [True, False]


E, ODDS = 1e-4, 1 / (math.exp(-0.5) + math.exp(-0.6))
EDGES: list[tuple[Sampling, list[float], list[float], int, float]] = [
    # (sampling, logits, noise, token, distance): the token at rank 4 has the highest score, and misses top-k by E
    (Sampling(temperature=1.0, top_k=3), [5, 4, 3, 3 - E, 0], [0, 0, 0, 9, 0], 3, E),
    # the token at rank 3 has the highest score and passes by E: without it token 0 is chosen
    (Sampling(temperature=1.0, top_k=3), [5, 4, 3, 3 - E, 0], [2, 0, 9, 0, 0], 0, E),
    # the edge of min-p at half the likeliest's probability, at T = 2
    (Sampling(temperature=2.0, min_p=0.5), [5, 5 - 2 * math.log(2) - E, 0], [0, 9, 0], 1, E),
    (Sampling(temperature=2.0, min_p=0.5), [5, 5 - 2 * math.log(2) + E, 0], [0, 9, 0], 0, E),
    # the odds of the mass before token 1 are ODDS, and those of the edge a factor e^-E or e^E from them
    (Sampling(temperature=1.0, top_p=1 / (1 + math.exp(E) / ODDS)), [0, -0.5, -0.6], [0, 9, 0], 1, E),
    (Sampling(temperature=1.0, top_p=1 / (1 + math.exp(-E) / ODDS)), [0, -0.5, -0.6], [0, 9, 0], 0, E),
    # no filter is near: the scores count
    (Sampling(temperature=1.0, top_k=2), [5, 4, 0], [0, 1 + E, 0], 0, E),
    (Sampling(temperature=1.0, top_k=2), [5, 4, 0], [0, 0, 9], 2, math.inf),
]


def test_the_gap_at_the_edge_of_a_filter_is_the_distance_to_it() -> None:
    for sampling, logits, noise, token, distance in EDGES:
        edges = Edges(sampling, torch.tensor(logits).double(), torch.tensor(noise).double())
        assert edges.gap(token, E / 16) == pytest.approx(distance, rel=0.02), (sampling, logits)


def judged(target: FrozenTarget, shape: str, kind: str = "lookup:2") -> list[bool]:
    """For every text that differs from plain decoding's, whether it is a near-tie. A wrong token never is."""
    requests = [Request([5, 6, 7 + i, 5, 6], 24, ignore_eos=True) for i in range(6)]
    plainly = texts(open_engine(target, None, max_length=64).generate(requests))
    engine = open_engine(target, build_untrained(kind, target), shape, max_length=64)
    drafted = texts(engine.generate(requests))
    wrong = [[*text[:9], (text[9] + 2) % 61, *text[10:]] for text in drafted]
    for bad in (wrong, [text[:9] for text in plainly]):  # which end early
        given = list(zip(requests, plainly, bad, strict=True))
        assert not any(check.is_near_tie for check in check_near_ties(engine, given))
    given = [each for each in zip(requests, plainly, drafted, strict=True) if each[1] != each[2]]
    return [check.is_near_tie for check in check_near_ties(engine, given)]


@pytest.mark.parametrize("case", ["bfloat16 chain:5", "bfloat16 tree:3x2x8", "float32 chain:5"])
def test_what_rounding_changes_is_a_near_tie_in_every_type(case: str) -> None:
    """In bfloat16 texts of several rows differ on every processor tried."""
    dtype, shape = case.split()
    target = make_target("llama", getattr(torch, dtype), **WIDE)
    assert all(judged(target, shape, kind="lookup:2" if shape.startswith("chain") else "early_exit:2"))


@pytest.mark.parametrize(("name", "here", "there"), [("top_k", 5, 6), ("top_p", 0.8, 0.85), ("min_p", 0.1, 0.05)])
def test_what_rounding_moves_over_the_edge_of_a_filter_is_a_near_tie_and_texts_of_another_filter_are_none(
    name: str, here: Any, there: Any, monkeypatch: Patch
) -> None:
    """A pass over several nodes is off by four units in the last place of bfloat16."""
    target = make_target("llama", torch.bfloat16, **WIDE)
    plain = open_engine(target, None, max_length=64, batch_size=4)
    engine = open_engine(target, build_untrained("early_exit:2", target), "chain:3", max_length=64, batch_size=4)
    requests, false = (
        [Request([5, 6, 7 + i], 16, Sampling(temperature=1.0, seed=i, **{name: value}), (), True) for i in range(16)]
        for value in (here, there)
    )
    lean_logits(monkeypatch, 0.06)
    plainly, honest, wrong = (
        texts(each.generate(asked)) for each, asked in ((plain, requests), (engine, requests), (engine, false))
    )
    for found, expected in ((honest, True), (wrong, False)):
        rows = zip(requests, plainly, honest, found, strict=True)
        given = [(r, own, text) for r, own, drafted, text in rows if text != own and (text != drafted) != expected]
        assert given and {check.is_near_tie for check in check_near_ties(engine, given)} == {expected}


def lean_logits(monkeypatch: Patch, error: float) -> None:
    """Have a pass over several nodes give every fourth token more."""
    outputs = Match.target_outputs

    def lean(self: Match, hidden: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor | None = None) -> Any:
        if hidden.shape[1] == 1:
            return outputs(self, hidden, positions, counts)
        logits = self.target.logits(hidden)
        return self.sampling.choose(logits + error * (torch.arange(logits.shape[-1]) % 4 == 1), positions, counts)

    monkeypatch.setattr(Match, "target_outputs", lean)


@pytest.mark.parametrize(("error", "near"), [(1e-6, True), (30.0, False)])
def test_an_error_that_both_texts_share_is_no_near_tie(error: float, near: bool, monkeypatch: Patch) -> None:
    """Tokens 2k and 2k + 1 tie, and a pass over several nodes gives some of them more, by rounding or by a fault."""
    target = make_target("llama", torch.float32, **WIDE)
    target.lm_head_weight.copy_(target.lm_head_weight[::2].repeat_interleave(2, dim=0))
    lean_logits(monkeypatch, error)
    found = judged(target, "chain:4")
    assert found and all(found) == near
