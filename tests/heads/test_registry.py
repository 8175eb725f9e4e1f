"""Construction of a head for a target: settings that the recipe leaves out follow the target."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from heads.parts.initial_weights import UNSURE
from heads.registry import HEADS, build_head
from heads.saved import target_record
from heads.targets.families import final_norm_scale, rope_scaling, rope_theta
from heads.targets.frozen_target import FrozenTarget
from tests.heads.targets.test_frozen_target import make_model
from tests.support.closeness import assert_close
from tests.support.refusals import refused

COUNTS = torch.arange(128)
KINDS = "eagle3", "medusa", "mtp"
LENGTH = {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH}
YARN = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, **LENGTH}


def test_what_is_left_out_follows_the_target(target: FrozenTarget) -> None:
    config = build_head("eagle3", {"loss": None}, target, COUNTS).config
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (32, 64, 128)
    assert config.num_target_layers == 8
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.aux_layer_ids, config.draft_vocab_size, config.max_position_embeddings) == ((2, 4, 5), 128, 512)
    assert (config.rope_theta, config.rms_norm_eps, config.loss, config.depth) == (1e4, 1e-6, "kl", 7)


def test_what_the_recipe_says_holds(target: FrozenTarget) -> None:
    settings = {"aux_layer_ids": [6, 1], "draft_vocab_size": 5, "intermediate_size": 20, "depth": 3, "rope_theta": 50.0}
    head = build_head("eagle3", {**settings, "num_attention_heads": 8, "head_dim": 4}, target, COUNTS)
    config = head.config
    assert (config.aux_layer_ids, config.intermediate_size, config.depth, config.rope_theta) == ((1, 6), 20, 3, 50.0)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 4)
    assert head.draft_to_target.tolist() == [123, 124, 125, 126, 127]  # the most counted
    assert head.fc.weight.shape == (32, 64)


def test_a_new_head_reads_out_as_the_target_does() -> None:
    """Less sure. Granite divides its logits by a constant, and a head's own output head has none."""
    target = FrozenTarget(make_model("granite", vocab_size=128, num_hidden_layers=8, logits_scaling=8.0), "granite")
    target.check()
    tokens, where = torch.randint(6, 128, (1, 9)), torch.arange(9)[None]
    with torch.no_grad():
        norm = target.base.get_submodule("norm").get_parameter("weight").uniform_(0.5, 2.0)
        features = target.packed_features(tokens, where, torch.zeros_like(where), [8])
        distribution = UNSURE * target.shared.lm_head(features.hidden)
        eagle, medusa, mtp = (build_head(kind, {"draft_vocab_size": 40}, target, COUNTS) for kind in KINDS)
        last = features.hidden * mtp.mtp_layers[0].final_layernorm.weight / norm.square().mean().sqrt()
        drafted = eagle.lm_head(eagle.norm(features.aux_hidden_states)), medusa.logits(features.hidden, 0)
        for logits in (*drafted, mtp.logits(last, mtp.lm_head_weight(target.shared))):
            assert_close(logits, distribution[..., eagle.draft_to_target])


LONGROPE: dict[str, Any] = {"rope_type": "longrope", **LENGTH}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}
IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"depth": 0}, "depth: should be greater than or equal to 1, got 0"),
    ("dflash", {"hidden_size": 8}, "hidden_size: is not permitted"),
    ("medusa", {"loss": "mse"}, "loss: should be 'labels', "),
    ("medusa", {"tree_nodes": 1}, "tree_nodes: expected 2 to 1024, or 0 for no tree"),
    ("draft", {"layers": [0], "lora": {"rank": 0}}, "lora.rank: should be greater"),
    ("dspark", {"ce_weight": 0.0, "l1_weight": 0.0}, "ce_weight, kl_weight, l1_weight: one must be above 0"),
    ("lilicorr", {"lilicorr_candidate_topk": 12}, "lilicorr_candidate_topk: should be 1, 2, 4, 8 or 16"),
    # What depends on the target.
    *(("eagle3", {"draft_vocab_size": size}, "draft_vocab_size") for size in (-1, 0, 129)),
    ("eagle3", {"aux_layer_ids": [9]}, "aux_layer_ids"),
    ("eagle3", {"num_attention_heads": 3}, "num_attention_heads: expected a multiple of num_key_value_heads"),
    ("eagle3", {"head_dim": 5}, "head_dim"),
    ("eagle3", {"sliding_window": 7}, "sliding_window: expected more than depth"),
    ("eagle3", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.1}}, "rope_scaling"),
    ("eagle3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: dynamic angles"),
    ("eagle3", {"rope_scaling": {"factor": 2.0}}, "rope_scaling.rope_type: expected one of default"),
    ("eagle3", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor: expected a number"),
    ("dflash", {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 3}}, "rope_scaling.short_factor: .* 4 .* got 3"),
    ("eagle3", {"rope_scaling": {**LONGROPE, "long_factor": 2.0}}, "rope_scaling.long_factor: .* got 2.0"),
    ("mtp", {"num_modules": 5}, "num_modules: expected at most depth"),
    ("mtp", {"layout": "qwen", "num_modules": 2}, "num_modules: expected 1"),
    ("dflash", {"block_size": 513}, "block_size: expected at most the target's context of 512, got 513"),
    ("dflash", {"sliding_window": 3}, "sliding_window: expected at least block_size"),
    ("dflash", {"sliding_window": 90, "num_layers": 1}, "sliding_window, layer_types: .* no layer slides"),
    ("dflash", {"layer_types": ("full_attention",), "num_layers": 2}, "layer_types: .* each of 2 layers"),
    ("dflash2", {"conv_group_size": 3}, "conv_group_size: expected a divisor of the target's width, 32"),
    ("dflash2", {"selector_top_k": 129}, "selector_top_k"),
    ("lilicorr", {"lilicorr_hidden_size": 20}, "lilicorr_hidden_size: expected a multiple of its 8 heads, got 20"),
    ("domino", {"pure_draft_prefix_len": 7}, "pure_draft_prefix_len: expected less than the 7 draft tokens"),
    ("draft", {"layers": [0, 8]}, "layers"),
    ("draft", {"fresh": {"hiden_size": 3}}, "fresh.hiden_size"),
    ("draft", {"fresh": {"num_attention_heads": 5}}, "fresh"),
]


@pytest.mark.parametrize(("kind", "settings", "key"), IMPOSSIBLE)
def test_impossible_settings_are_named(kind: str, settings: dict[str, Any], key: str, target: FrozenTarget) -> None:
    assert re.match(rf"head\.{key}", refused(build_head, kind, settings, target, COUNTS))


def test_a_target_of_two_widths_is_refused() -> None:
    target = FrozenTarget(make_model("opt"), "opt")
    said = refused(build_head, "eagle3", {"aux_layer_ids": [1, 2, 3]}, target, torch.ones(40))
    assert "opt: its embeddings are 8 wide and its hidden states 16" in said


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "cohere"])
def test_the_final_norms_scale_is_found(family: str) -> None:
    """Whatever the family stores, the scale is what the norm multiplies a normed state with."""
    target = FrozenTarget(make_model(family), family)
    norm = target.base.get_submodule("ln_f" if family == "gpt2" else "norm")
    with torch.no_grad():
        norm.get_parameter("weight").uniform_(0.5, 2.0)
    x = torch.randn(16)
    x = (x - x.mean()) / x.std(correction=0)  # normed already, by root mean square and by deviation
    scale = final_norm_scale(target.base, target.layers, 16)
    torch.testing.assert_close(norm(x[None])[0], x * scale, atol=1e-4, rtol=1e-4)


SIZES: dict[str, Any] = dict(
    hidden_size=32, num_attention_heads=4, num_hidden_layers=8, max_position_embeddings=512, **LENGTH
)
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", LLAMA3),
    "gpt-oss's yarn": ("qwen2", YARN | {"truncate": False}),
    "linear": ("llama", {"rope_type": "linear", "factor": 4}),
    "longrope": ("phi3", LONGROPE),
}


@pytest.mark.parametrize(("family", "scaling"), SCALED.values(), ids=SCALED.keys())
def test_new_heads_have_the_targets_positions(family: str, scaling: dict[str, Any]) -> None:
    """Also in both engines, which read config.json as transformers does."""
    target = FrozenTarget(make_model(family, **SIZES, rope_parameters={"rope_theta": 5e4, **scaling}), family)
    for kind in ("eagle3", "mtp", "dflash", "dspark"):
        settings = {"mask_token_id": 3} if kind.startswith("d") else {}
        head = build_head(kind, settings, target, torch.zeros(target.vocab_size))
        assert head.config.rope_scaling == scaling and head.config.max_position_embeddings == 512
        if kind != "mtp":  # its config.json is the target's
            said = HEADS[kind].format.engine_config(head.config, target_record(target), "float32")
            read = AutoConfig.for_model(**said).rope_parameters
            assert read == {"rope_theta": 5e4, **scaling} and type(read.get("factor", 1.0)) is float


def test_other_positions_than_the_targets_claim_the_length_that_they_hold_for() -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 8, "max_position_embeddings": 512}
    scaled, plain = (
        FrozenTarget(make_model("llama", **sizes, rope_parameters={"rope_theta": 1e4, **scaling}), "llama")
        for scaling in (LLAMA3, {"rope_type": "default"})
    )

    def claimed(target: FrozenTarget, scaling: dict[str, Any] | None) -> int:
        config = build_head("eagle3", {"rope_scaling": scaling}, target, torch.ones(40)).config
        return int(config.max_position_embeddings)

    assert claimed(scaled, None) == 512 and claimed(scaled, {"rope_type": "default"}) == 64
    assert claimed(scaled, YARN) == 128 and claimed(plain, LLAMA3) == 512 and claimed(plain, None) == 512


@pytest.mark.parametrize(
    ("kind", "width", "part", "factors"),
    [
        ("eagle3", None, 1.0, [1.0, 1.1, 1.2, 1.5]),
        ("eagle3", 4, 1.0, [1.0, 1.2]),
        ("mtp", 4, 1.0, [1.0, 1.2]),
        ("dflash", 16, 1.0, [1.0, 1.05, 1.1, 1.15, 1.2, 1.35, 1.5, 1.5]),
        ("eagle3", None, 0.5, [1.0, 1.25, 1.5, 1.5]),  # a new head turns whole
        ("dflash", 4, 0.5, [1.0, 1.5]),
    ],
)
def test_factors_are_of_a_heads_frequencies(kind: str, width: int | None, part: float, factors: list[float]) -> None:
    """LongRoPE has one for each frequency that the target's heads turn, which may be wider."""
    longrope = LONGROPE | ({"short_factor": [1.0, 1.5], "long_factor": [1.0, 8.0]} if part < 1 else {})
    rope = {"rope_theta": 1e4, **longrope, "partial_rotary_factor": part}
    target = FrozenTarget(make_model("phi3", **SIZES, num_key_value_heads=2, head_dim=8, rope_parameters=rope), "phi")
    settings = {"head_dim": width} | ({"mask_token_id": 5} if kind == "dflash" else {})
    config = build_head(kind, settings, target, torch.ones(40)).config
    assert config.rope_scaling["rope_type"] == "longrope" and config.max_position_embeddings == 512
    assert config.rope_scaling["short_factor"] == pytest.approx(factors)


def test_positions_that_are_plain_for_a_head() -> None:
    for scaling in (
        {"rope_type": "default", "mrope_section": [1, 1, 2]},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    ):
        assert rope_scaling(SimpleNamespace(rope_parameters={"rope_theta": 1e4, **scaling})) is None
    by_layer = {name: {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0} for name in ("full_attention", "other")}
    assert rope_scaling(SimpleNamespace(rope_parameters=by_layer)) == {"rope_type": "linear", "factor": 8.0}


def test_rope_theta_is_found_wherever_it_is_kept() -> None:
    assert rope_theta(SimpleNamespace()) == rope_theta(SimpleNamespace(rope_parameters=None)) == 1e4
    assert rope_theta(SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 5e5})) == 5e5
    by_layer = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    assert rope_theta(SimpleNamespace(rope_parameters=by_layer)) == 1e6
    assert rope_theta(AutoConfig.for_model("qwen2", rope_theta=1e6)) == 1e6
