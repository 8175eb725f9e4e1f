"""The frozen target: what heads see of it is what the model computes, for every family, and nothing else loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from eval.measure.open_models import load_pair
from eval.runtime.engine import Engine, EngineOptions
from heads.parts.head_shape import check_aux_layer_ids, default_aux_layer_ids, shallow_aux_layer_ids
from heads.registry import build_head
from heads.saved import target_record
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from heads.targets.native_decoder import why_not_native
from heads.targets.shape_target import load_shape
from heads.targets.smaller_models import empty_model, keep_layers, load_smaller, model_record, own_weights
from heads.targets.target_files import load_end_ids
from tests.conftest import make_tiny_tokenizer
from tests.support.closeness import assert_close
from tests.support.native_mtp import change_config
from tests.support.refusals import refused

BASE: dict[str, Any] = dict(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MOE: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=8)
DEEPSEEK: dict[str, Any] = MOE | dict(
    num_key_value_heads=2, head_dim=4, n_routed_experts=4, n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8,
    qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
)  # fmt: skip
GEMMA4 = dict(sliding_window=4, vocab_size_per_layer_input=40, hidden_size_per_layer_input=4)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": dict(tie_word_embeddings=True),
    "qwen2 mixed": dict(use_sliding_window=True, sliding_window=4, max_window_layers=2),
    "qwen3_moe": dict(num_experts=4, **MOE),
    "gemma2": dict(sliding_window=4, query_pre_attn_scalar=8, final_logit_softcapping=2.0),
    "gemma3_text": dict(sliding_window=4, query_pre_attn_scalar=8, sliding_window_pattern=2),
    "mistral": dict(sliding_window=4),
    "ministral": dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    "phi3": dict(sliding_window=4),
    "gpt2": dict(n_embd=16, n_layer=4, n_head=2, n_positions=64),
    "gpt_neo": dict(num_layers=4, num_heads=2, attention_types=[[["global", "local"], 2]], window_size=4),
    "gpt_bigcode": dict(multi_query=True),
    "falcon": dict(head_dim=None, multi_query=True, new_decoder_architecture=False, alibi=False),
    "gpt_oss": dict(num_local_experts=4, sliding_window=4, **MOE),
    "opt": dict(ffn_dim=24, word_embed_proj_dim=8),
    "olmo3": dict(sliding_window=4),
    "cohere": dict(logit_scale=0.5),
    "cohere2": dict(logit_scale=0.5, sliding_window=4, sliding_window_pattern=2),
    "granite": dict(logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v2": DEEPSEEK | dict(topk_method="greedy"),
    "smollm3": dict(use_sliding_window=True, sliding_window=4),
    "afmoe": dict(num_experts=4, num_dense_layers=1, sliding_window=4, **MOE),
    "jetmoe": dict(num_local_experts=4, num_experts_per_tok=2, kv_channels=8),
    "gemma4_text": GEMMA4,
    "gemma4_text sharing keys": GEMMA4
    | dict(num_kv_shared_layers=1, layer_types=["sliding_attention", "full_attention"] * 2),
}
AUTO: Any = AutoModelForCausalLM
LENGTHS = (7, 10)  # of the packed documents, both longer than the window


def make_model(family: str, **changes: Any) -> Any:
    """A tiny random model, the same every time; family may bear a note after a space."""
    given = {**BASE, **FAMILIES.get(family, {}), **changes}
    config = AutoConfig.for_model(
        family.split()[0], **{name: value for name, value in given.items() if value is not None}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AUTO.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and document numbers of one row of two documents."""
    tokens = torch.randint(3, 40, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return tokens, positions, torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS))[None]


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_a_packed_row_are_those_of_the_model_for_each_document_alone(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype=torch.float32)
    n, D = target.num_layers, target.hidden_size
    tokens, positions, documents = packed()
    features = target.packed_features(tokens, positions, documents, range(n + 1))
    logits = target.shared.lm_head(features.hidden)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        with torch.no_grad():
            alone = target.model(tokens[:, rows], output_hidden_states=True, use_cache=False)
        assert_close(logits[:, rows], alone.logits, roundings=512)
        states = torch.cat(alone.hidden_states[:n], dim=-1)
        assert_close(features.aux_hidden_states[:, rows, : n * D], states, roundings=512)
        start += length
    if family == "llama":  # the last one is the last layer's output, before the norm
        last = features.aux_hidden_states[..., n * D :]
        assert torch.equal(target.base.get_submodule("norm")(last), features.hidden)


def test_auxiliary_layers() -> None:
    """Deep targets have EAGLE-3's own, shallow ones get a proposal that engines capture, and bad ones are named."""
    for n, expected in {7: (2, 3, 4), 8: (2, 4, 5), 36: (2, 18, 33)}.items():
        assert default_aux_layer_ids(n) == expected
        assert check_aux_layer_ids([3, 0, 2], n) == (0, 2, 3)
        for bad in ([], [1, 1], [-1], [n + 1]):
            assert refused(check_aux_layer_ids, bad, n).startswith("head.aux_layer_ids: ")
    assert "head.aux_layer_ids" not in refused(default_aux_layer_ids, 1)
    for n in range(2, 7):
        assert "head.aux_layer_ids" in refused(default_aux_layer_ids, n)
        proposed = shallow_aux_layer_ids(n)
        assert check_aux_layer_ids(proposed, n) == tuple(proposed) and len(proposed) >= 2 and max(proposed) < n


def test_the_fingerprint_is_of_the_weights_not_of_their_dtype(tmp_path: Path) -> None:
    model = make_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "one")
    stored, wide = (load_target(str(tmp_path / "one"), dtype=dtype) for dtype in (None, torch.float32))
    assert stored.dtype == torch.bfloat16 and wide.dtype == torch.float32
    assert stored.fingerprint == wide.fingerprint
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.1)
    model.save_pretrained(tmp_path / "other")
    assert load_target(str(tmp_path / "other")).fingerprint != stored.fingerprint


def test_an_end_token_beyond_the_vocabulary_is_refused() -> None:
    model = make_model("llama")
    model.generation_config.eos_token_id = [2, 40]
    said = refused(FrozenTarget, model, "odd")
    assert "odd: eos_token_id: expected ids below 40, its vocabulary, got 40; fix" in said


@pytest.mark.parametrize(
    ("generated", "described", "own", "ends", "line"),
    [
        ([8, 9], 9, "</s>", {8, 9, 1}, "disagree on the tokens that end a text: its tokenizer names '</s>' (1), "),
        ([1, 9], [7, 1], "</s>", {1, 9}, "config.json "),  # which engines do not read beside the other file
        ([1, 9], 9, "</s>", {1, 9}, ""),
        ([1, 9], None, None, {1, 9}, ""),
        (None, [7, 1], "</s>", {7, 1}, ""),
        (None, None, "</s>", {1}, "generation_config.json none, config.json none; here a text ends at '</s>' (1)"),
        (None, None, None, set(), "neither its tokenizer nor its configs name a token that ends a text"),
    ],
)
def test_texts_end_at_the_tokens_at_which_engines_end_them(
    generated: Any, described: Any, own: str | None, ends: set[int], line: str,
    tiny_target_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = tmp_path / "model"
    shutil.copytree(tiny_target_dir, folder)
    change_config(folder, eos_token_id=described)
    file, generation = folder / "tokenizer_config.json", folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": own}))
    generation.unlink() if generated is None else generation.write_text(json.dumps({"eos_token_id": generated}))
    target, tokenizer = load_pair(str(folder), dtype="float32", device=torch.device("cpu"), trust_remote_code=False)
    assert set(target.eos_token_ids) == set(load_end_ids(str(folder), tokenizer)) == ends
    said = [record.message for record in caplog.records if record.name == "draftsmith"]
    assert len(said) == bool(line) and line in "".join(said)


@pytest.mark.parametrize(
    ("family", "words"),
    [("llama4_text", "chunked_attention"), ("mamba", "linear_attention"), ("rwkv", "recurrent state")],
)
def test_families_with_another_kind_of_past_are_refused(family: str, words: str) -> None:
    small = dict(vocab_size=40, hidden_size=16, num_hidden_layers=4, num_local_experts=2)
    with torch.device("meta"):
        model = AUTO.from_config(AutoConfig.for_model(family, **small))
    assert words in refused(FrozenTarget, model, "its-path")


VISION: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, depth=1, num_heads=2,
    out_hidden_size=16, deepstack_visual_indexes=[], video_temporal_patch_size=2,
)  # fmt: skip
ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
NEMOTRON: dict[str, Any] = dict(
    mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=8,
    layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
)  # fmt: skip
MULTIMODAL: dict[str, dict[str, Any]] = {
    "mistral3": dict(model_type="mistral", sliding_window=4),
    "qwen3_vl": dict(rope_parameters=ROPE),
    "muse_glimmer": dict(output_multiplier=0.5, final_logit_softcapping=2.0, sliding_window=4),
    "nemotron_h_omni": NEMOTRON,
}
"""family -> settings of its language model."""
NATIVE = {"mistral3"}
TIES = "tie_word_embeddings"


def make_multimodal(family: str, placeholder: int) -> Any:
    """A tiny random model, the same every time, with images in the place of token `placeholder`."""
    text = BASE | MULTIMODAL[family]
    sizes = {"out_hidden_size": 64, "projector_hidden_size": 8, "vision_hidden_size": 16}
    given: Any = {name: sizes[name] for name in AutoConfig.for_model(family).to_dict().keys() & sizes.keys()}
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=VISION, image_token_id=placeholder, video_token_id=41, **given
    )
    auto: Any = AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return auto.from_config(config).eval()


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_language_model_of_a_multimodal_checkpoint_is_a_target(family: str, tmp_path: Path) -> None:
    """transformers has no class for the language models of these alone. Without images their placeholder is a token as
    any other; Muse-Glimmer's own class embeds another in its place, so it has none here."""
    model = make_multimodal(family, placeholder=40 if family == "muse_glimmer" else 39)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    target = load_target(str(tmp_path), dtype=torch.float32)
    assert (why_not_native(target) is None) == (family in NATIVE)
    first = LENGTHS[0] if target.is_recurrent else 0  # a document alone
    tokens, positions, documents = (part[:, first:] for part in packed())
    features = target.packed_features(tokens, positions, documents, [1, 2])
    logits = target.shared.lm_head(features.hidden)[:, -LENGTHS[1] :]
    with torch.no_grad():
        alone = model(tokens[:, -LENGTHS[1] :], use_cache=False).logits
    assert_close(logits, alone, roundings=512)
    assert target_record(target)["architecture"] == type(model).__name__
    assert load_shape(str(tmp_path)).hidden_size == 16


@pytest.mark.parametrize(
    ("whole", "text", "is_said"),
    [(True, None, True), (False, True, True), (True, False, True), (None, False, False)],
    ids=["a language model", "the text's config", "the whole config", "by default alone"],
)
def test_both_tables_are_used_where_a_config_ties_what_its_checkpoint_does_not(
    whole: bool | None, text: bool | None, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama", tie_word_embeddings=False) if text is None else make_multimodal("mistral3", 39)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {TIES: whole}
    if text is not None:
        config["text_config"][TIES] = text
    if whole is None:
        del config[TIES]
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_target(str(tmp_path), dtype=torch.float32)
    said = [record.message for record in caplog.records if record.name == "draftsmith"]
    assert ["config.json ties the embeddings" in line for line in said] == [True] * is_said
    assert target.two_tables == is_said
    embeddings: Any = target.shared.embed_tokens
    tables = embeddings.weight, target.lm_head_weight
    assert torch.equal(tables[1], model.lm_head.weight) and not torch.equal(*tables)
    name = str(tmp_path)
    draft = keep_layers(target, [0, 1]) if text is None else load_smaller(name, FrozenTarget(model, name))
    restored: Any = empty_model(model_record(draft))
    restored.load_state_dict(own_weights(draft), strict=False)
    found = restored.get_input_embeddings().weight, restored.get_output_embeddings().weight
    assert all(torch.equal(one, other) for one, other in zip(found, tables, strict=True))


def test_heads_take_the_commonest_shape_of_layers_that_differ() -> None:
    """transformers refuses to name one width for all heads of a Gemma-4, and a Gemma-3n has one of its MLP a layer."""
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    target = FrozenTarget(make_model("gemma4_text", head_dim=8, global_head_dim=16, layer_types=layers), "")
    head = build_head("eagle3", {"aux_layer_ids": [1, 2]}, target, torch.ones(40, dtype=torch.int64))
    assert (head.config.head_dim, head.config.intermediate_size) == (8, 24)


def test_a_window_that_the_class_does_not_read_is_refused() -> None:
    text = refused(FrozenTarget, make_model("llama", sliding_window=4), "its-path")
    assert "its-path" in text and "sliding_window of 4" in text
    FrozenTarget(make_model("llama", sliding_window=64), "longer than any text")


def test_texts_end_where_rotary_positions_would_come_to_depend_on_the_batch() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope |= {"original_max_position_embeddings": 24}
    target = FrozenTarget(make_model("phi3", rope_parameters=rope, original_max_position_embeddings=24), "phi")
    assert target.context_length == 24
    assert "the context of phi" in refused(Engine, target, None, EngineOptions(max_length=25))


def test_several_residual_streams_are_refused_by_heads_that_read_them() -> None:
    more: dict[str, Any] = dict(num_kv_shared_layers=0, laurel_rank=2, activation_sparsity_pattern=None)
    target = FrozenTarget(make_model("gemma3n_text", **GEMMA4, **more), "its-path")
    tokens, positions, documents = packed()
    assert target.packed_features(tokens, positions, documents, ()).hidden.shape == (1, 17, 16)
    text = refused(target.packed_features, tokens, positions, documents, [1])
    assert "its-path" in text and "several residual streams" in text


def test_logits_that_are_not_the_models_are_noticed() -> None:
    """Llama does not read `logit_scale`, so what is made of its hidden states is not what it says itself."""
    FrozenTarget(make_model("llama"), "llama").check()
    assert "its logits differ" in refused(FrozenTarget(make_model("llama", logit_scale=0.5), "llama").check)
