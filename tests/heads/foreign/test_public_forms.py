"""The forms in which other projects publish heads, each by what sets its config.json apart, made small. A form is read
as the head that it is, with what engines would read otherwise, and comes back from our own files; or it is refused."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.blocks.backbone import DraftBlockHead
from heads.published import is_published, read_published
from heads.targets.frozen_target import FrozenTarget
from tests.support import published_heads as forms
from tests.support.published_heads import LLAMA3, D, V, comes_back, drafts_equal, eagle3, write
from tests.support.refusals import refused

IDS = "eagle_aux_hidden_state_layer_ids"
Config = dict[str, Any]
Row = tuple[Callable[..., Any], Config, Config, bool]
"""Maker of the head, its settings, config.json, and whether an engine would read it otherwise."""

YARN = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=32)
DEEPSEEK = YARN | dict(beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707)
MROPE = dict(type="mrope", mrope_section=[1, 1, 2])
QUARTER = dict(rope_type="default", partial_rotary_factor=0.25)
TYPES = ["sliding_attention", "full_attention"]
SLIDES = dict(layer_types=tuple(TYPES), sliding_window=9)
WINDOWS: Config = dict(layer_types=TYPES, sliding_window=9, use_sliding_window=True)
BOTH_WAYS = SLIDES | dict(sliding_causal=False)
ALL_SLIDE = BOTH_WAYS | dict(layer_types=("sliding_attention",) * 2)
QWEN: Config = dict(rope_theta=1e6, rope_scaling=None, max_window_layers=8, use_sliding_window=False)
OWN = dict(own_embeddings=True, target_hidden_size=D)


def raw(settings: Config | None = None, *, differs: bool = False, **config: Any) -> Row:
    return eagle3, settings or {}, forms.RAW | {"head_dim": None} | config, differs


def llama(settings: Config | None = None, *, layer: Config | None = None, **config: Any) -> Row:
    """An EAGLE-3 head by speculators, whose layer has positions that a new target has."""
    layer = forms.SPECULATORS["transformer_layer_config"] | (layer or {})
    settings = {"aux_layer_ids": (1, 3, 6), "norm_before_residual": True, "rope_scaling": LLAMA3} | (settings or {})
    return eagle3, settings, forms.SPECULATORS | {"transformer_layer_config": layer} | config, True


def zlab(settings: Config | None = None, *, differs: bool = False, **config: Any) -> Row:
    return forms.dflash, settings or {}, forms.ZLAB | config, differs


def nested(form: Config, **own: Any) -> Config:
    return form | {"dflash_config": form["dflash_config"] | own}


def within(**own: Any) -> Config:
    return {"dflash_config": forms.ZLAB["dflash_config"] | own}


def turned(scaling: Config) -> Config:
    return dict(rope_theta=None, rope_parameters=scaling | {"rope_theta": 7e4})


TWO_LISTS: Config = {IDS: [1, 3, 6], "eagle_config": {IDS: [1, 3, 6]}}
NAMED = {IDS: [1, 3, 4], "use_aux_hidden_state": True}
NVIDIA = NAMED | dict(
    use_input_layernorm_in_first_layer=True, use_last_layernorm=True, use_mtp_layernorm=False, next_layer_regular=True,
    parallel_draft_step=1, parallel_draft_heads_num_layers=1,
)  # fmt: skip
NVIDIA_ROPE: Config = dict(rope_theta=7e4, rope_scaling=dict(rope_type="default", rope_theta=7e4), mlp_bias=False)
NVIDIA_DFLASH = {name: value for name, value in forms.ZLAB.items() if name != "auto_map"} | dict(rope_scaling=None)
NVIDIA_DSPARK = nested(
    NVIDIA_DFLASH, projector_type="dspark", shift_label=True, markov_rank=6, markov_head_type="vanilla",
    use_confidence_head=True,
)  # fmt: skip
BY_DEFAULT: Config = dict(norm_before_fc=True, norm_output=True)
FORMS: dict[str, dict[str, Row]] = {
    "raw EAGLE-3": {
        "SpecForge": raw(),
        "SpecForge, DeepSeek-V2-Lite": raw({"rope_scaling": DEEPSEEK}, rope_scaling=DEEPSEEK),
        "SpecForge, Gemma-3": raw({"rope_theta": 1e6}, **QWEN, sliding_window=9, target_model_type="gemma3_text"),
        "SpecForge, Llama 3": raw(dict(rope_theta=7e4, rope_scaling=LLAMA3), rope_theta=7e4, rope_scaling=LLAMA3),
        "SpecForge, QwQ": raw({"rope_theta": 1e6}, model_type="qwen2", **QWEN),
        "SpecForge, Qwen2.5-VL, whose width is no multiple of its heads": raw(
            {"rope_theta": 1e6, "num_attention_heads": 6}, differs=True,
            **QWEN | dict(rope_scaling=MROPE, num_attention_heads=6, head_dim=8),
        ),
        "EAGLE-3.1": raw({"fc_norm": True, "norm_output": True}, fc_norm=True, norm_output=True),
        "a normed residual": raw({"norm_before_residual": True}, differs=True, norm_before_residual=True),
        "other layers": raw({"aux_layer_ids": (1, 3, 6)}, differs=True, eagle_config=NAMED | {IDS: [0, 2, 5]}),
        "embeddings and the last layer": raw({"aux_layer_ids": (0, 8)}, differs=True, eagle_config={IDS: [-1, 7]}),
        "two lists of layers": raw({"aux_layer_ids": (1, 3, 6)}, differs=True, **TWO_LISTS),
        "positions of a part": raw(
            {"rope_scaling": QUARTER}, differs=True, rope_scaling=QUARTER | {"mrope_section": [1, 0, 0]}
        ),
        "a factor of attention": raw(
            {"rope_scaling": YARN | {"attention_factor": 1.5}}, differs=True,
            rope_scaling=YARN | {"attention_factor": 1.5},
        ),
        "a window": raw({"sliding_window": 9}, differs=True, sliding_window=9, layer_types=["sliding_attention"]),
        "EAGLE": raw(differs=True, architectures=["LlamaForCausalLM"]),
        "EAGLE, narrower": raw(OWN | {"hidden_size": 24}, hidden_size=24, head_dim=8, target_hidden_size=D),
        "wider": raw(
            OWN | dict(hidden_size=48, norm_before_fc=True), hidden_size=48, head_dim=8, target_hidden_size=D,
            norm_before_fc=True,
        ),
        "embeddings of its own": raw({"own_embeddings": True}, differs=True),
        "Model Optimizer, two layers": raw(
            {"rope_theta": 7e4, "num_layers": 2}, differs=True, eagle_config=NVIDIA, num_hidden_layers=2, **NVIDIA_ROPE
        ),
        "DeepSpec": raw(
            {"qk_norm": True, "aux_layer_ids": (1, 4, 6), "draft_vocab_size": V, "rope_theta": 1e6}, differs=True,
            architectures=["Qwen3Eagle3Model"], model_type="qwen3", head_dim=8, draft_vocab_size=None,
            target_layer_ids=[0, 3, 5], num_target_layers=8, **QWEN,
        ),
    },
    "speculators' EAGLE-3": {
        "Llama's layer": llama(),
        "Qwen3's layer": llama({"qk_norm": True}, layer={"model_type": "qwen3"}),
        "Qwen3.6": llama(
            {"rope_scaling": QUARTER, "rope_theta": 1e7},
            layer={"rope_parameters": QUARTER | dict(rope_theta=1e7, mrope_section=[1, 0, 0], mrope_interleaved=True)},
        ),
        "narrower": llama(OWN | {"hidden_size": 24}, layer={"hidden_size": 24}, target_hidden_size=D),
        "what is trained by default": llama(
            BY_DEFAULT | {"sliding_window": 9}, **BY_DEFAULT,
            layer={"sliding_window": 9, "layer_types": ["sliding_attention"]},
        ),
    },
    "DFlash": {
        "z-lab": zlab(),
        "tied": zlab(tie_word_embeddings=True, use_sliding_window=None),
        "Model Optimizer": (forms.dflash, {}, NVIDIA_DFLASH, False),
        "default layers": zlab({"aux_layer_ids": (2, 6)}, dflash_config={"mask_token_id": 5}),
        "the last layer": zlab({"aux_layer_ids": (2, 4, 8)}, differs=True, **within(target_layer_ids=[1, 3, 7])),
        "causal": zlab({"causal": True}, differs=True, **within(causal=True)),
        "causal for both engines": zlab({"causal": True}, is_causal=True),
        "Qwen3.6's windows": zlab(SLIDES, **WINDOWS),
        "windows of all": zlab(ALL_SLIDE, differs=True, **within(use_swa=True, swa_window_size=9)),
        "windows, not causal for vLLM alone": zlab(BOTH_WAYS, differs=True, **WINDOWS, **within(causal=False)),
        "positions of a part": zlab({"rope_scaling": QUARTER}, differs=True, **turned(QUARTER)),
        "scaled positions": zlab({"rope_scaling": LLAMA3}, **turned(LLAMA3)),
    },
    "speculators' DFlash": {
        "": (forms.dflash, {}, forms.SPECULATORS_DFLASH | {"architectures": ["DFlashSpeculator"]}, True)
    },
    "DFlash2": {"": (forms.dflash2, {}, forms.ZLAB2, False)},
    "speculators' DFlash2": {"": (forms.dflash2, {}, forms.SPECULATORS_DFLASH2, True)},
    "DSpark": {
        "DeepSpec": (forms.dspark, {}, forms.DEEPSPEC, False),
        "SpecForge": (forms.dspark, {}, forms.SPECFORGE_DSPARK, True),
        "SpecForge, Kimi-K3": (forms.dspark, {"rope_scaling": YARN}, forms.SPECFORGE_DSPARK | turned(YARN), True),
        "Model Optimizer": (forms.dspark, {}, NVIDIA_DSPARK, True),
    },
    "speculators' DSpark": {
        "": (forms.dspark, {}, forms.SPECULATORS_DSPARK | {"architectures": ["DSparkSpeculator"]}, True)
    },
    "LiLiCorr": {"": (forms.lilicorr, {}, forms.LILICORR, False)},
    "XPress": {"": (forms.xpress, {}, forms.XPRESS, True)},
    "speculators' XPress": {"": (forms.xpress, {}, forms.SPECULATORS_XPRESS, True)},
    "Domino": {
        "its authors": (forms.domino, {}, forms.DOMINO, True),
        "SpecForge": (forms.domino, {}, forms.DOMINO | {"architectures": ["DominoDraftModel"]}, True),
        "SpecForge's defaults": (
            forms.domino, {"pure_draft_prefix_len": 0, "shift_label": False},
            forms.ZLAB | within(projector_type="domino", emb_dim=5, gru_hidden_dim=6), True,
        ),
    },
}  # fmt: skip


def their_names(weights: Mapping[str, Tensor], form: str, name: str) -> dict[str, Tensor]:
    """The tensors as the project names them."""
    if form.startswith("speculators'") or name.startswith("Model Optimizer"):
        weights = forms.layers_0(weights)
        weights = {name: value for name, value in weights.items() if not re.match(r"layers\.[1-9]\.hidden_norm", name)}
    if name.startswith("Model Optimizer"):
        weights = {
            name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): value
            for name, value in weights.items()
        }
    if form == "speculators' XPress":
        weights = {forms.OF_SPECULATORS.get(name, name): value for name, value in weights.items()}
    return dict(weights)


@pytest.mark.parametrize(("form", "name"), [(form, name) for form, rows in FORMS.items() for name in rows])
def test_a_head_is_read_as_its_project_meant_it(form: str, name: str, target: FrozenTarget, tmp_path: Path) -> None:
    make, settings, config, differs = FORMS[form][name]
    head = make(**settings)
    weights = their_names(head.to_checkpoint(), form, name)
    if isinstance(head, DraftBlockHead):  # beside which other projects save the target's own
        embed: Any = target.shared.embed_tokens
        weights |= {"embed_tokens.weight": embed.weight.bfloat16(), "lm_head.weight": target.lm_head_weight}
    path = write(tmp_path / "head", config, weights)
    assert is_published(path)
    found = read_published(path, target)
    drafts_equal(found, head, target)
    assert found.origin.form == form and list(found.origin.files) == ["model.safetensors"]
    assert bool(found.origin.differs) is differs, found.origin.differs
    comes_back(found, tmp_path, target)


def test_windows_in_speculators_form(target: FrozenTarget, tmp_path: Path) -> None:
    """vLLM reads what is said of the sliding layers as said of all."""
    for bidirectional, types in product((True, False), (TYPES, ["sliding_attention"] * 2)):
        head = forms.dflash(sliding_window=9, layer_types=tuple(types), sliding_causal=not bidirectional)
        layer = forms.SPECULATORS_DFLASH["transformer_layer_config"] | WINDOWS | {"layer_types": types}
        said = {"transformer_layer_config": layer, "sliding_window_non_causal": bidirectional}
        found = read_published(write(tmp_path / "head", forms.SPECULATORS_DFLASH | said, head.to_checkpoint()), target)
        drafts_equal(found, head, target)
        misread = any("makes all layers causal" in line for line in found.origin.differs)
        assert misread is (not bidirectional and types == TYPES)


Change = Callable[[dict[str, Tensor]], object]
TABLE = {"embed_tokens.weight": torch.ones(V, D)}
NARROW = forms.RAW | dict(hidden_size=24, target_hidden_size=D)
narrow = partial(eagle3, hidden_size=24, **OWN)


def keep(weights: dict[str, Tensor]) -> None:
    """Change nothing."""


@pytest.mark.parametrize(("share", "doubt"), [(0.0, ": it looks untrained"), (0.5, "")])
def test_embeddings_of_another_table_are_said(share: float, doubt: str, target: FrozenTarget, tmp_path: Path) -> None:
    """With what engines do with them."""
    embed: Any = target.shared.embed_tokens
    noise = torch.randn(V, D, generator=torch.Generator().manual_seed(0)) * embed.weight.std()
    table = {"embed_tokens.weight": share * embed.weight + noise}
    head = read_published(write(tmp_path / "head", forms.RAW, eagle3().to_checkpoint() | table), target)
    assert torch.equal(head.embed_tokens.weight, table["embed_tokens.weight"])
    (line,) = (line for line in head.origin.differs if "embed_tokens.weight" in line)
    assert re.search(rf"not the target's table \(mean cosine -?0\.\d\d{doubt}\); .* as by vLLM .* SGLang .* puts", line)


NOT_READ: list[tuple[Config, str]] = [
    (forms.RAW | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4}, "P-EAGLE"),
    (forms.SPECULATORS | dict(architectures=["MTPDraftModel"], speculators_model_type="mtp"), "stitch_mtp"),
    (forms.RAW | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "latent attention"),
    (forms.DEEPSPEC | {"architectures": ["Gemma4DSparkModel"]}, "Gemma-4's layers"),
    (forms.RAW | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None, "bias": False}, "EAGLE-1"),
    ({"architectures": ["BertModel"]}, "eagle3"),
    (forms.ZLAB | {"architectures": ["DFlash3DraftModel"]}, "DFlash3DraftModel"),
    (forms.RAW | {"eagle_config": NVIDIA | {"use_aux_hidden_state": False}}, "use_aux_hidden"),
    (forms.RAW | {"hidden_act": "gelu"}, "hidden_act"),
    (forms.RAW | {"hidden_size": 64, "head_dim": 16}, "width"),
    (forms.RAW | {"transformer_layer_config": [1]}, "config.json"),
    (forms.ZLAB | {"num_target_layers": 36}, "number of layers 36"),
    (nested(forms.ZLAB, mask_token_id=V), "mask_token_id: expected an id below 128"),
    (forms.ZLAB | {"layer_types": TYPES}, "sliding_window"),
    (nested(forms.ZLAB, use_swa=True, swa_window_size=9, attention_sink_bias=True), "attention_sink_bias"),
    (nested(forms.ZLAB2, output_multiplier=0.5), "output_multiplier"),
    (forms.ZLAB2 | {"input_embedding_scale": 8.0}, "input_embedding_scale"),
    (forms.SPECULATORS_DSPARK | {"sample_from_anchor": False}, "sample_from_anchor"),
]
"""config.json and a word of the refusal, whatever the tensors."""
UNFIT: list[tuple[Callable[[], Any] | None, Config, Change, str]] = [
    (eagle3, forms.RAW, lambda weights: weights.pop("norm.weight"), "norm.weight"),
    (eagle3, forms.RAW, lambda weights: weights.update(strange=torch.ones(2)), "strange"),
    (eagle3, forms.RAW, lambda weights: weights["d2t"].add_(V), "d2t"),
    (eagle3, forms.RAW, lambda weights: weights["t2d"].logical_not_(), "t2d marks"),
    (eagle3, forms.RAW | {"eagle_config": {IDS: [1, 7, 30]}}, keep, "layers"),
    (narrow, NARROW, lambda weights: weights.pop("embed_tokens.weight"), "embed_tokens.weight: by config.json"),
    (narrow, NARROW | {"target_hidden_size": 40}, keep, "made for a target with width 40, but"),
    (forms.dflash, forms.ZLAB, lambda weights: weights.update(TABLE), "embed_tokens.weight"),
    (forms.dflash2, nested(forms.ZLAB2, selector_rank=None), keep, "selector_rank"),
    (forms.dspark, forms.DEEPSPEC | {"markov_head_type": "gated"}, keep, "markov_head_type"),
    (forms.dspark, forms.SPECULATORS_DSPARK | {"draft_vocab_size": 64}, keep, "d2t"),
    (forms.lilicorr, forms.XPRESS, keep, "lilicorr.anchor_norm.weight"),
    (forms.xpress, forms.ZLAB, keep, "xpress_head.down_g.weight"),
    (forms.domino, nested(forms.DOMINO, gru_hidden_dim=7), keep, "embed_proj.0.weight"),
    *((None, config, keep, words) for config, words in NOT_READ),
]
"""Maker of the head, config.json, a change of the tensors, and words of the refusal."""


@pytest.mark.parametrize(("make", "config", "change", "words"), UNFIT, ids=[row[-1] for row in UNFIT])
def test_what_is_not_read_and_what_does_not_fit_is_named(
    make: Callable[[], Any] | None, config: Config, change: Change, words: str, target: FrozenTarget, tmp_path: Path
) -> None:
    made = {"fc.weight": torch.zeros(32, 64)} if make is None else make().to_checkpoint()
    weights = {name: value.clone() for name, value in made.items()}
    change(weights)
    path = write(tmp_path / "head", config, weights)
    text = refused(read_published, path, target)
    assert path in text and words in text
