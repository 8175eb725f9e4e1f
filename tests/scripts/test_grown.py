"""Growing keeps the function: target, head, and what the runtime accepts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.benchmark.figures import target_facts
from eval.reporting.format import heading
from eval.runtime.engine import Engine, EngineOptions, Request, Sampling
from heads.checkpoint import load_head, save_head, target_record
from heads.errors import UserError
from heads.registry import build_head
from heads.target.frozen import FrozenTarget, load_target
from heads.tree import parse_shape
from scripts.grown.heads import HeadSize, grow_head
from scripts.grown.shapes import ModelShape
from scripts.grown.target import Growth, grow_llama, shape_of

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
    torch.manual_seed(0)
    target = load_target(str(tiny_target_dir), dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return target


@pytest.fixture(scope="module")
def grown(small: FrozenTarget) -> FrozenTarget:
    return FrozenTarget(grow_llama(small.model, BIG), "grown")


def features(target: FrozenTarget, tokens: torch.Tensor, aux_layer_ids: tuple[int, ...]) -> Any:
    positions = torch.arange(tokens.shape[1])[None].expand(tokens.shape)
    return target.packed_features(tokens, positions, torch.zeros_like(positions), aux_layer_ids)


def test_a_grown_target_is_the_same_function(small: FrozenTarget, grown: FrozenTarget) -> None:
    assert shape_of(grown.config) == BIG
    tokens = torch.randint(6, 128, (2, 30), generator=torch.Generator().manual_seed(0))
    ours, theirs = features(grown, tokens, (2, 8)), features(small, tokens, (2, 8))
    logits, expected = grown.shared.lm_head(ours.hidden), small.shared.lm_head(theirs.hidden)
    torch.testing.assert_close(logits[..., :128], expected, atol=1e-5, rtol=1e-5)  # rotary tables are float32
    assert logits[..., 128:].amax() < expected.amin() - 100
    torch.testing.assert_close(
        ours.aux_hidden_states[..., :32], theirs.aux_hidden_states[..., :32], atol=1e-5, rtol=1e-5
    )
    assert float(ours.aux_hidden_states[..., 33:48].abs().max()) == 0


NORMED = {"fc_norm": True, "norm_output": True}
FAMILIES: dict[str, tuple[str, dict[str, Any], HeadSize]] = {
    "eagle3": ("eagle3", {"draft_vocab_size": 100}, HeadSize(90, 110)),
    "eagle3.1": ("eagle3", {"draft_vocab_size": 100, **NORMED}, HeadSize(90, 110)),
    "eagle3, output normed": ("eagle3", {"norm_output": True}, HeadSize()),
    "mtp": ("mtp", {"draft_vocab_size": 100}, HeadSize(90)),
    "mtp, every id and step": ("mtp", {"num_modules": 3, "layout": "deepseek"}, HeadSize()),
    "medusa": ("medusa", {"draft_vocab_size": 100, "num_layers": 2, "tree_nodes": 0}, HeadSize()),
    "medusa, every id": ("medusa", {"tree_nodes": 0}, HeadSize()),
    "draft": ("draft", {"layers": [0, 7]}, HeadSize()),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, small: FrozenTarget) -> tuple[Any, Any]:
    """A head of random weights, and the same grown."""
    kind, settings, size = FAMILIES[request.param]
    torch.manual_seed(0)
    head: Any = build_head(kind, settings, small, torch.rand(128)).double()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.3)
    growth = Growth(shape_of(small.config), BIG, small.config.rms_norm_eps)
    return head, grow_head(head, growth, size)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grown_head_drafts_and_is_accepted_alike(
    temperature: float, family: tuple[Any, Any], small: FrozenTarget, grown: FrozenTarget
) -> None:
    requests = [
        Request(torch.randint(6, 128, (n,)).tolist(), 24, Sampling(temperature=temperature, seed=n)) for n in (4, 9)
    ]
    one, other = (
        Engine(target, drafter, EngineOptions(shape=parse_shape("tree:3x3x9"), batch_size=2, max_length=64)).generate(
            requests
        )
        for target, drafter in zip((small, grown), family, strict=True)
    )
    assert [output.tokens for output in one] == [output.tokens for output in other]
    assert [output.accepted for output in one] == [output.accepted for output in other]


def test_a_grown_head_is_saved_and_read_back(
    family: tuple[Any, Any], grown: FrozenTarget, tiny_target_dir: Path, tmp_path: Path
) -> None:
    head = family[1].float()
    save_head(head, tmp_path / "head", target={**target_record(grown), "name": str(tiny_target_dir)})
    again: Any = load_head(tmp_path / "head")
    for name, tensor in head.to_checkpoint().items():
        assert torch.equal(again.to_checkpoint()[name], tensor), name


def test_ids_that_were_added_are_never_drafted(small: FrozenTarget, grown: FrozenTarget) -> None:
    """Not even late in a long draft, where a state that is recycled might have lost what excludes them."""
    for settings in ({}, NORMED):
        torch.manual_seed(1)
        head = build_head("eagle3", {"draft_vocab_size": 100, **settings}, small, torch.rand(128)).double()
        growth = Growth(shape_of(small.config), BIG, small.config.rms_norm_eps)
        large: Any = grow_head(head, growth, HeadSize(draft_vocab_size=122))
        engine = Engine(grown, large, EngineOptions(shape=parse_shape("chain:12"), max_length=64))
        seen: list[int] = []
        draft = large.propose

        def recorded(*arguments: Any, draft: Any = draft, seen: list[int] = seen) -> Any:
            proposal = draft(*arguments)
            seen += proposal.tokens.flatten().tolist()
            return proposal

        large.propose = recorded
        engine.generate([Request([7, 9, 20], 24, Sampling(temperature=1.5, seed=3))])
        assert seen and max(seen) < 128


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("eagle3", HeadSize(draft_vocab_size=4096), "draft_vocab_size: a head of 128 draft ids can be grown"),
        ("mtp", HeadSize(8), "intermediate_size: a head of 64 cannot be grown to 8"),
        ("mtp", HeadSize(draft_vocab_size=200), "draft_vocab_size: only an EAGLE-3 head"),
        ("medusa", HeadSize(90), "intermediate_size: the head has no block"),
    ],
)
def test_sizes_that_a_head_cannot_have(kind: str, size: HeadSize, words: str, small: FrozenTarget) -> None:
    growth = Growth(shape_of(small.config), BIG, small.config.rms_norm_eps)
    with pytest.raises(UserError, match=words):
        grow_head(build_head(kind, {}, small, torch.ones(128)), growth, size)


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
