"""Growing keeps the function: target, head, and what the runtime accepts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.grown import Growth, ModelShape, grow_eagle3, grow_llama, shape_of
from eval.report import heading
from eval.results import target_facts
from eval.runtime.engine import Engine, Request, Sampling
from heads.errors import UserError
from heads.registry import build_head
from heads.target import FrozenTarget, load_target
from heads.tree import parse_shape

BIG = ModelShape(
    hidden_size=48,
    num_hidden_layers=11,
    num_attention_heads=12,
    num_key_value_heads=3,
    head_dim=12,
    intermediate_size=80,
    vocab_size=150,
)


@pytest.fixture(scope="module")
def small(tiny_target_dir: Path) -> FrozenTarget:
    target = load_target(str(tiny_target_dir), dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return target


@pytest.fixture(scope="module")
def grown(small: FrozenTarget) -> FrozenTarget:
    return FrozenTarget(grow_llama(small.model, BIG), "grown")


def features(target: FrozenTarget, tokens: torch.Tensor, taps: tuple[int, ...]) -> Any:
    positions = torch.arange(tokens.shape[1])[None].expand(tokens.shape)
    return target.packed_features(tokens, positions, torch.zeros_like(positions), taps)


def test_a_grown_target_is_the_same_function(small: FrozenTarget, grown: FrozenTarget) -> None:
    assert shape_of(grown.config) == BIG
    tokens = torch.randint(6, 128, (2, 30))
    ours, theirs = features(grown, tokens, (2, 8)), features(small, tokens, (2, 8))
    logits, expected = grown.ends.logits(ours.hidden), small.ends.logits(theirs.hidden)
    torch.testing.assert_close(logits[..., :128], expected, atol=1e-5, rtol=1e-5)  # rotary tables are float32
    assert logits[..., 128:].amax() < expected.amin() - 100
    torch.testing.assert_close(ours.taps[..., :32], theirs.taps[..., :32], atol=1e-5, rtol=1e-5)
    assert float(ours.taps[..., 33:48].abs().max()) == 0


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grown_head_drafts_and_is_accepted_alike(
    temperature: float, normed: bool, small: FrozenTarget, grown: FrozenTarget
) -> None:
    torch.manual_seed(0)
    head = build_head(
        "eagle3", {"draft_vocab_size": 100, "fc_norm": normed, "norm_output": normed}, small, torch.rand(128)
    ).double()
    growth = Growth(shape_of(small.config), BIG, small.config.rms_norm_eps)
    size = 100 if normed else 110
    large = grow_eagle3(head, growth, intermediate_size=90, draft_vocab_size=size, num_layers=11)
    assert large.config.taps == head.config.taps and large.lm_head.weight.shape == (size, 48)
    requests = [
        Request(torch.randint(6, 128, (n,)).tolist(), 24, Sampling(temperature=temperature, seed=n)) for n in (4, 9)
    ]
    shape = parse_shape("tree:3x3x9")
    one, other = (
        Engine(target, drafter, shape=shape, batch_size=2, max_length=64).generate(requests)
        for target, drafter in ((small, head), (grown, large))
    )
    assert [output.tokens for output in one] == [output.tokens for output in other]
    assert [output.accepted for output in one] == [output.accepted for output in other]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 16}, "hidden_size: a model of 32 cannot be grown to 16"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_key_value_heads: 2 query heads share a key head"),
        ({"num_attention_heads": 13}, "13 heads of 12 must be whole groups"),
        ({"hidden_size": 32}, "vocab_size: more ids need a wider model"),
    ],
)
def test_shapes_that_do_not_hold_the_small_model(change: dict[str, int], words: str, small: FrozenTarget) -> None:
    with pytest.raises(UserError, match=words):
        grow_llama(small.model, replace(BIG, **change))


def test_other_models_are_refused() -> None:
    config = LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, attention_bias=True)
    with pytest.raises(UserError, match="expected a Llama without biases"):
        grow_llama(LlamaForCausalLM(config), BIG)


def test_reports_call_a_grown_target_so(grown: FrozenTarget) -> None:
    grown.config.grown_from = "recipes/quickstart/target"
    results = {"target": target_facts(grown), "head": {"kind": "eagle3"}}
    assert heading(results) == "eagle3 on grown (grown from quickstart/target)"
