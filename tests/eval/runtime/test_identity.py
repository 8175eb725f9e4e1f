"""The audit of narrow numbers: a text given token by token, and what counts as a near-tie."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.runtime.engine import Request
from eval.runtime.identity import Flip, find_flips, pinned_engine
from eval.runtime.sampling import Sampling
from heads.target.frozen import FrozenTarget
from tests.small_targets import open_engine

TargetOf = Callable[[str], FrozenTarget]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.9, seed=4), Sampling(temperature=0.8, top_k=9, top_p=0.9, seed=5)]
)
def test_plain_decodings_own_text_has_no_flips_and_a_changed_token_is_one(
    sampling: Sampling, target_of: TargetOf
) -> None:
    target = target_of("llama")
    request = Request([5, 6, 7], 12, sampling, ignore_eos=True)
    pinned = open_engine(target, None, batch_size=2, max_length=64, pinned=4)
    tokens = pinned.generate([request])[0].tokens
    assert find_flips(pinned, request, tokens) == []
    changed = [*tokens[:6], (tokens[6] + 1) % 61, *tokens[7:]]
    flips = find_flips(pinned, request, changed)
    assert (flips[0].position, flips[0].token, flips[0].chosen) == (6, changed[6], tokens[6])
    assert flips[0].gap > 0 and not flips[0].is_near_tie
    first = find_flips(pinned, request, [(tokens[0] + 1) % 61, *tokens[1:]])[0]
    assert first.position == 0 and not first.is_near_tie


def test_the_gap_is_that_of_the_logits(target_of: TargetOf) -> None:
    target = target_of("llama")
    prompt = [5, 6, 7]
    pinned = open_engine(target, None, max_length=64, pinned=3)
    tokens = pinned.generate([Request(prompt, 3, ignore_eos=True)])[0].tokens
    wrong = (tokens[2] + 1) % 61
    (flip,) = find_flips(pinned, Request(prompt, 3, ignore_eos=True), [*tokens[:2], wrong])
    logits = target.model(torch.tensor([[*prompt, *tokens[:2]]])).logits[0, -1]
    assert flip.gap == pytest.approx(float(logits[tokens[2]] - logits[wrong]), rel=1e-5)


def test_two_units_in_the_last_place_are_near() -> None:
    assert Flip(3, 1, 2, gap=0.25, ulp=0.125).is_near_tie and not Flip(3, 1, 2, gap=0.26, ulp=0.125).is_near_tie


def test_the_reference_has_the_rounds_shape(target_of: TargetOf, scripted_head: Any) -> None:
    target = target_of("llama")
    engine = open_engine(target, scripted_head(target, []), "tree:3x3x8", batch_size=2, max_length=64)
    pinned = pinned_engine(engine)
    assert (pinned.nodes, pinned.options.batch_size, pinned.options.max_length, pinned.head) == (8, 2, 64, None)
