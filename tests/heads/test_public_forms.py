"""The forms in which other projects publish heads, each by what sets its config.json apart, made small. A form is read
as the head that it is, and comes back from our own files; or it is refused by its own name."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.published import read_published
from heads.targets.model import FrozenTarget
from tests.heads.published_heads import (
    DEEPSPEC,
    LLAMA3,
    RAW,
    SPECFORGE_DSPARK,
    SPECULATORS,
    SPECULATORS_DFLASH,
    SPECULATORS_DFLASH2,
    SPECULATORS_DSPARK,
    ZLAB,
    ZLAB2,
    V,
    dflash,
    dflash2,
    dspark,
    eagle3,
    write,
)
from tests.heads.test_published import comes_back, drafts_equal
from tests.refusals import refused

IDS = "eagle_aux_hidden_state_layer_ids"
Config = dict[str, Any]
Row = tuple[Callable[..., Any], Config, Config]
"""Maker of the head, its settings, and config.json."""

YARN = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=32)
DEEPSEEK = YARN | dict(beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707)
MROPE = dict(type="mrope", mrope_section=[1, 1, 2])
QUARTER = dict(rope_type="default", partial_rotary_factor=0.25)
SLIDES = dict(layer_types=("sliding_attention", "full_attention"), sliding_window=9)
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=9, use_sliding_window=True)
ALL_SLIDE = dict(layer_types=("sliding_attention",) * 2, sliding_window=9, sliding_causal=False)
QWEN = dict(rope_theta=1e6, rope_scaling=None, max_window_layers=8, use_sliding_window=False)
OWN = dict(own_embeddings=True, target_hidden_size=32)


def raw(settings: Config | None = None, **config: Any) -> Row:
    return eagle3, settings or {}, RAW | {"head_dim": None} | config


def llama(settings: Config | None = None, *, layer: Config | None = None, **config: Any) -> Row:
    """An EAGLE-3 head by speculators, whose layer has positions that a new target has."""
    layer = SPECULATORS["transformer_layer_config"] | (layer or {})
    settings = {"aux_layer_ids": (1, 3, 6), "norm_before_residual": True, "rope_scaling": LLAMA3} | (settings or {})
    return eagle3, settings, SPECULATORS | {"transformer_layer_config": layer} | config


def nested(form: Config, **own: Any) -> Config:
    return form | {"dflash_config": form["dflash_config"] | own}


NAMED = {IDS: [1, 3, 4], "use_aux_hidden_state": True}
NVIDIA = NAMED | dict(
    use_input_layernorm_in_first_layer=True, use_last_layernorm=True, use_mtp_layernorm=False, next_layer_regular=True,
    parallel_draft_step=1, parallel_draft_heads_num_layers=1,
)  # fmt: skip
NVIDIA_ROPE = dict(rope_theta=7e4, rope_scaling=dict(rope_type="default", rope_theta=7e4), mlp_bias=False)
NVIDIA_DFLASH = {name: value for name, value in ZLAB.items() if name != "auto_map"} | dict(rope_scaling=None)
NVIDIA_DSPARK = nested(
    NVIDIA_DFLASH, projector_type="dspark", shift_label=True, markov_rank=6, markov_head_type="vanilla",
    use_confidence_head=True,
)  # fmt: skip
TRAINED = dict(target_model_name_or_path="org/target", ttt_length=7, step_loss_decay=0.8, num_target_layers=8)
DFLASH: Row = dflash, {}, ZLAB
SPARK: Row = dspark, {}, SPECFORGE_DSPARK

READ: dict[str, dict[str, Row]] = {
    "SpecForge": {
        "deepseek-v2-lite-eagle3": raw({"rope_scaling": DEEPSEEK}, rope_scaling=DEEPSEEK),
        "deepseek-v3-671b-eagle3": raw(eagle_config=NAMED),
        "gemma3-1b-eagle3": raw({"rope_theta": 1e6}, **QWEN | dict(sliding_window=9, target_model_type="gemma3_text")),
        "glm-5.2-dspark, inkling-dspark, qwen3-4b-dspark, qwen3-8b-dspark, qwen3.6-27b-dspark": SPARK,
        "gpt-oss-120B-eagle3, gpt-oss-20B-eagle3": raw(eagle_config={IDS: [1, 3, 4]}),
        "kimi-k3-dspark": (
            dspark, {"rope_scaling": YARN},
            SPECFORGE_DSPARK | dict(rope_theta=None, rope_parameters=YARN | {"rope_theta": 7e4}),
        ),
        "lfm2.5-1.2b-instruct-dflash": (dflash, {}, ZLAB | dict(tie_word_embeddings=True, use_sliding_window=None)),
        "ling-flash-2.0-eagle3, llama3-8B-eagle3, llama4-scout-17B-16E-eagle3": raw(),
        "llama3-70B-ealge3": raw({"rope_theta": 5e5, "rope_scaling": LLAMA3}, rope_theta=5e5, rope_scaling=LLAMA3),
        "longcat-flash-dflash, qwen2.5-0.5b-dflash, qwen3-4b-dflash, qwen3-8b-dflash, qwen3.5-35b-a3b-dflash": DFLASH,
        "longcat-flash-eagle3": raw({"rope_theta": 1e6, "draft_vocab_size": V}, **QWEN | dict(draft_vocab_size=V)),
        "phi4-eagle3": raw({"rope_theta": 2.5e5}, model_type="phi3", rope_theta=2.5e5),
        "qwen2-5-vl-7b-eagle3": raw({"rope_theta": 1e6}, **QWEN | dict(rope_scaling=MROPE, sliding_window=9)),
        "qwen2.5-vl-32b-eagle3": raw(  # whose width is no multiple of its heads
            {"rope_theta": 1e6, "num_attention_heads": 6},
            **QWEN | dict(rope_scaling=MROPE, sliding_window=9, num_attention_heads=6, head_dim=8),
        ),
        "qwen2.5-0.5b-eagle3, qwen2.5-7b-eagle3": raw({"rope_theta": 1e6}, **QWEN | dict(sliding_window=9)),
        "qwen3-235B-A22B-eagle3": raw({"rope_theta": 1e6}, eagle_config=NAMED, rope_theta=1e6),
        "qwen3-30B-A3B-eagle3.1": raw(
            {"rope_theta": 1e6, "fc_norm": True, "norm_output": True}, fc_norm=True, norm_output=True, **QWEN
        ),
        "qwen3-4b-eagle3, -8b, -32b, -30B-A3B, -coder-30B-A3B-instruct, -coder-480B-A35B-instruct, -coder-next": raw(
            {"rope_theta": 1e6}, **QWEN
        ),
        "qwen3-next-80b-a3b-eagle3, qwen3.5-35b-a3b-eagle3": raw({"rope_theta": 1e6}, decoder_sparse_step=1, **QWEN),
        "qwen3.5-4b-dflash": (dflash, {}, ZLAB | dict(tie_word_embeddings=True)),
        "qwen3.6-27b-dflash": (dflash, SLIDES, ZLAB | WINDOWS),
        "qwq-32B-eagle3": raw({"rope_theta": 1e6}, model_type="qwen2", **QWEN | dict(sliding_window=9)),
    },
    "speculators": {
        "eagle3, Llama's layer": llama(),
        "eagle3, its default class": llama(architectures=["Eagle3Speculator"]),
        "eagle3, Qwen3's layer": llama({"qk_norm": True}, layer={"model_type": "qwen3"}),
        "eagle3, two layers": llama({"num_layers": 2}, layer={"num_hidden_layers": 2}),
        "eagle3, Qwen3.6": llama(
            {"rope_scaling": QUARTER, "rope_theta": 1e7},
            layer={"rope_parameters": QUARTER | dict(rope_theta=1e7, mrope_section=[1, 0, 0], mrope_interleaved=True)},
        ),
        "eagle3, narrower": llama(OWN | {"hidden_size": 24}, layer={"hidden_size": 24}, target_hidden_size=32),
        "dflash": (dflash, {}, SPECULATORS_DFLASH | {"architectures": ["DFlashSpeculator"]}),
        "dflash2": (dflash2, {}, SPECULATORS_DFLASH2),
        "dspark": (dspark, {}, SPECULATORS_DSPARK | {"architectures": ["DSparkSpeculator"]}),
    },
    "Model Optimizer": {
        "eagle3": raw({"rope_theta": 7e4}, eagle_config=NVIDIA, **NVIDIA_ROPE),
        "eagle3, YaRN": raw(
            {"rope_scaling": YARN | {"truncate": False}}, eagle_config=NVIDIA, rope_scaling=YARN | {"truncate": False}
        ),
        "eagle3, two layers": raw(
            {"rope_theta": 7e4, "num_layers": 2}, eagle_config=NVIDIA, num_hidden_layers=2, **NVIDIA_ROPE
        ),
        "dflash": (dflash, {}, NVIDIA_DFLASH),
        "dflash, windows": (
            dflash, ALL_SLIDE,
            nested(NVIDIA_DFLASH | {"sliding_window": 9}, use_swa=True, swa_window_size=9, causal=False),
        ),
        "dspark": (dspark, {}, NVIDIA_DSPARK),
    },
    "z-lab": {
        "DFlash": DFLASH,
        "DFlash, Qwen3.6": (dflash, SLIDES, ZLAB | WINDOWS),
        "DFlash2": (dflash2, {}, ZLAB2),
    },
    "DeepSpec": {
        "DSpark": (dspark, {}, DEEPSPEC),
        "EAGLE-3": raw(
            {"qk_norm": True, "aux_layer_ids": (1, 4, 6), "draft_vocab_size": V, "rope_theta": 1e6},
            architectures=["Qwen3Eagle3Model"], model_type="qwen3", head_dim=8, draft_vocab_size=None,
            target_layer_ids=[0, 3, 5], **QWEN | TRAINED,
        ),
    },
    "EAGLE": {
        "EAGLE-3": raw(architectures=["LlamaForCausalLM"]),
        "EAGLE-3, Llama-3.3-70B": raw(
            OWN | {"hidden_size": 24}, architectures=["LlamaForCausalLM"], hidden_size=24, head_dim=8,
            target_hidden_size=32,
        ),
    },
}  # fmt: skip

DOMINO = nested(
    ZLAB | {"architectures": ["DominoDraftModel"], "auto_map": {"AutoModel": "domino.DominoDraftModel"}},
    projector_type="domino", pure_draft_prefix_len=1, emb_dim=8, gru_hidden_dim=16, shift_label=True,
)  # fmt: skip
NO_VOCABULARY = {name: value for name, value in RAW.items() if name != "draft_vocab_size"}
REFUSED: dict[str, dict[str, tuple[Config, str]]] = {
    "SpecForge": {
        "qwen3-8b-domino, qwen3.5-4b-domino, qwen3.6-27b-domino-full-attention": (DOMINO | {"emb_dim": 8}, "Domino"),
        "qwen3-8b-peagle": (RAW | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4}, "P-EAGLE"),
    },
    "speculators": {
        "peagle": (SPECULATORS | dict(architectures=["PEagleSpeculator"], speculators_model_type="peagle"), "P-EAGLE"),
        "mtp": (
            SPECULATORS | dict(architectures=["MTPDraftModel"], speculators_model_type="mtp"), "stitch_mtp",
        ),
        "dspark, gated": (SPECULATORS_DSPARK | {"markov_head_type": "gated"}, "markov_head_type: expected vanilla"),
    },
    "Model Optimizer": {
        "eagle3, last state": (RAW | {"eagle_config": NVIDIA | {"use_aux_hidden_state": False}}, "use_aux_hidden"),
        "eagle3, Kimi-K2": (RAW | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "latent attention"),
        "domino": (nested(NVIDIA_DFLASH, projector_type="domino", emb_dim=8, gru_hidden_dim=16), "Domino"),
        "dspark, recurrent": (nested(NVIDIA_DSPARK, markov_head_type="rnn"), "markov_head_type: expected vanilla"),
    },
    "DeepSpec": {
        "DSpark, Gemma-4": (DEEPSPEC | {"architectures": ["Gemma4DSparkModel"]}, "Gemma-4's layers"),
        "EAGLE-3, Gemma-4": (NO_VOCABULARY | {"architectures": ["Gemma4Eagle3Model"]}, "Gemma-4's layers"),
        "DFlash": (DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False}, "markov_rank"),
    },
    "EAGLE": {"EAGLE": (NO_VOCABULARY | {"architectures": ["LlamaForCausalLM"], "bias": False}, "first two kinds")},
}  # fmt: skip


def their_names(weights: Mapping[str, Tensor], project: str) -> dict[str, Tensor]:
    """The tensors as the project names them."""
    if project in ("speculators", "Model Optimizer"):
        weights = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
        weights = {name: value for name, value in weights.items() if not re.match(r"layers\.[1-9]\.hidden_norm", name)}
    if project == "Model Optimizer":
        weights = {
            name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): value
            for name, value in weights.items()
        }
    return dict(weights)


FORMS = [(project, form) for project, forms in READ.items() for form in forms]


@pytest.mark.parametrize(("project", "form"), FORMS)
def test_a_public_form_is_read(project: str, form: str, target: FrozenTarget, tmp_path: Path) -> None:
    make, settings, config = READ[project][form]
    head = make(**settings)
    path = write(tmp_path / "head", config, their_names(head.to_checkpoint(), project))
    found = read_published(path, target)
    drafts_equal(found, head, target)
    comes_back(found, tmp_path, target)


OTHERS = [(project, form) for project, forms in REFUSED.items() for form in forms]


@pytest.mark.parametrize(("project", "form"), OTHERS)
def test_a_public_form_is_refused_by_its_name(project: str, form: str, target: FrozenTarget, tmp_path: Path) -> None:
    config, words = REFUSED[project][form]
    path = write(tmp_path / "head", config, {"fc.weight": torch.zeros(32, 64)})
    assert words in refused(read_published, path, target)
