"""DFlash and DSpark heads in other projects' forms, and plain models, draft what the same weights draft in ours, and
whatever does not fit is refused."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.methods.block import DraftBlockHead
from heads.methods.block_attention import all_blocks
from heads.published import is_published, open_any, read_published, start_from
from heads.registry import build_head
from heads.targets.model import FrozenTarget
from tests.conftest import make_tiny_tokenizer
from tests.heads.published_heads import (
    DEEPSPEC,
    LILICORR,
    LLAMA3,
    OF_SPECULATORS,
    SPECFORGE_DSPARK,
    SPECULATORS_DFLASH,
    SPECULATORS_DFLASH2,
    SPECULATORS_DSPARK,
    SPECULATORS_XPRESS,
    XPRESS,
    ZLAB,
    ZLAB2,
    D,
    V,
    dflash,
    dflash2,
    dspark,
    lilicorr,
    write,
    xpress,
)
from tests.heads.small_heads import greedy, seen, target_batch
from tests.heads.test_published import PART, Change, does_not_fit, drafts_equal, set_in
from tests.refusals import refused

FORMS: dict[str, tuple[Callable[..., DraftBlockHead], dict[str, Any]]] = {
    "LiLiCorr": (lilicorr, LILICORR),
    "XPress": (xpress, XPRESS),
    "speculators' XPress": (xpress, SPECULATORS_XPRESS),
    "z-lab": (dflash, ZLAB),
    "z-lab's DFlash2": (dflash2, ZLAB2),
    "DeepSpec": (dspark, DEEPSPEC),
    "SpecForge's DSpark": (dspark, SPECFORGE_DSPARK),
    "speculators' DFlash": (dflash, SPECULATORS_DFLASH),
    "speculators' DFlash2": (dflash2, SPECULATORS_DFLASH2),
    "speculators' DSpark": (dspark, SPECULATORS_DSPARK),
}


def tables(target: FrozenTarget) -> dict[str, Tensor]:
    """The target's own, as other projects save them beside a head."""
    embed: Any = target.shared.embed_tokens
    return {"embed_tokens.weight": embed.weight.bfloat16(), "lm_head.weight": target.lm_head_weight}


@pytest.mark.parametrize("form", FORMS)
def test_a_head_is_read_as_its_project_meant_it(form: str, target: FrozenTarget, tmp_path: Path) -> None:
    make, config = FORMS[form]
    head = make()
    weights = head.to_checkpoint()
    if form == "speculators' XPress":
        weights = {OF_SPECULATORS.get(name, name): value for name, value in weights.items()}
    path = write(tmp_path / "head", config, {**weights, **tables(target)})
    assert is_published(path)
    found = read_published(path, target)
    drafts_equal(found, head, target)
    ours = {"z-lab": "DFlash", "z-lab's DFlash2": "DFlash2", "DeepSpec": "DSpark", "SpecForge's DSpark": "DSpark"}
    assert found.origin.form == ours.get(form, form)
    loaded = form in ("z-lab", "z-lab's DFlash2", "DeepSpec", "LiLiCorr")  # by both engines, as they are
    assert bool(found.origin.differs) is not loaded


@pytest.mark.parametrize("form", ["speculators' DFlash", "speculators' DSpark"])
def test_a_draft_vocabulary_is_read_in_any_order_and_by_rows_of_the_targets_output_head(
    form: str, target: FrozenTarget, tmp_path: Path
) -> None:
    make, config = FORMS[form]
    head = make(draft_vocab_size=48)
    assert head.kept is not None
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    weights = {**head.to_checkpoint(), "lm_head.weight": target.lm_head_weight[head.kept]}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in weights:
            weights[name] = weights[name][order]
    weights["d2t"] = head.kept[order] - torch.arange(48)
    path = write(tmp_path / "head", config | {"draft_vocab_size": 48}, weights)
    drafts_equal(read_published(path, target), head, target)
    for kind in ("dflash", "dspark", "lilicorr"):
        assert "measured, not trained" in refused(start_from, path, kind, {}, target, torch.ones(V))
    weights["lm_head.weight"] = weights["lm_head.weight"] * 2
    path = write(tmp_path / "other", config | {"draft_vocab_size": 48}, weights)
    assert "lm_head.weight is not the target's own" in refused(read_published, path, target)


LAST = {"mask_token_id": 5, "target_layer_ids": [1, 3, 7]}
ALL_SLIDE = ("sliding_attention",) * 2
SLIDING = {"layer_types": ("sliding_attention", "full_attention")}
WINDOW = {"layer_types": list(SLIDING["layer_types"]), "use_sliding_window": True, "sliding_window": 9}
ODD: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    ("block size inside", {}, {"block_size": None, "dflash_config": ZLAB["dflash_config"] | {"block_size": 4}}, False),
    ("default layers", {"aux_layer_ids": (2, 6)}, {"dflash_config": {"mask_token_id": 5}}, False),
    ("rope", {}, {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, False),
    ("causal", {"causal": True}, {"dflash_config": ZLAB["dflash_config"] | {"causal": True}}, True),
    ("is causal", {"causal": True}, {"is_causal": True}, False),
    ("last", {"aux_layer_ids": (2, 4, 8)}, {"dflash_config": LAST}, True),
    ("window", SLIDING | {"sliding_window": 9}, WINDOW, False),
    ("window of all", SLIDING | {"sliding_window": 7, "sliding_causal": False, "layer_types": ALL_SLIDE},
     {"dflash_config": ZLAB["dflash_config"] | {"use_swa": True, "swa_window_size": 7}}, True),
    ("window, not causal", SLIDING | {"sliding_window": 9, "sliding_causal": False}, WINDOW | {"is_causal": False},
     False),
    ("window, not causal for vLLM alone", SLIDING | {"sliding_window": 9, "sliding_causal": False},
     WINDOW | {"dflash_config": ZLAB["dflash_config"] | {"causal": False}}, True),
    ("part", {"rope_scaling": PART}, {"rope_theta": None, "rope_parameters": PART | {"rope_theta": 7e4}}, True),
    ("scaled", {"rope_scaling": LLAMA3}, {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 7e4}}, False),
]  # fmt: skip


def test_windows_in_speculators_form(target: FrozenTarget, tmp_path: Path) -> None:
    """vLLM reads what is said of the sliding layers as said of all."""
    for bidirectional, types in product((True, False), (SLIDING["layer_types"], ALL_SLIDE)):
        head = dflash(sliding_window=9, layer_types=types, sliding_causal=not bidirectional)
        layer = SPECULATORS_DFLASH["transformer_layer_config"] | WINDOW | {"layer_types": list(types)}
        said = {"transformer_layer_config": layer, "sliding_window_non_causal": bidirectional}
        found = read_published(write(tmp_path / "head", SPECULATORS_DFLASH | said, head.to_checkpoint()), target)
        drafts_equal(found, head, target)
        misread = any("makes all layers causal" in line for line in found.origin.differs)
        assert misread is (not bidirectional and types != ALL_SLIDE)


@pytest.mark.parametrize(("settings", "config", "differs"), [odd[1:] for odd in ODD], ids=[odd[0] for odd in ODD])
def test_oddities_of_a_dflash_head(
    settings: dict[str, Any], config: dict[str, Any], differs: bool, target: FrozenTarget, tmp_path: Path
) -> None:
    head = dflash(**settings)
    found = read_published(write(tmp_path / "head", ZLAB | config, head.to_checkpoint()), target)
    drafts_equal(found, head, target)
    assert bool(found.origin.differs) is differs


def test_confidence_that_does_not_look_at_the_token_before(target: FrozenTarget, tmp_path: Path) -> None:
    head = dspark()
    assert head.confidence_head is not None
    with torch.no_grad():
        head.confidence_head.proj.weight[:, D:] = 0
    weights = head.to_checkpoint()
    weights["confidence_head.proj.weight"] = weights["confidence_head.proj.weight"][:, :D]
    config = DEEPSPEC | {"confidence_head_with_markov": False}
    drafts_equal(read_published(write(tmp_path / "head", config, weights), target), head, target)


def set_inside(**changes: Any) -> Change:
    return lambda config, weights: config.update(dflash_config=config["dflash_config"] | changes)


BAD: dict[str, tuple[Change, str]] = {
    "embeddings of its own": (
        lambda config, weights: weights.update({"embed_tokens.weight": torch.ones(V, D)}), "embed_tokens.weight"
    ),
    "depth": (set_in(num_target_layers=36), "number of layers 36"),
    "mask outside the embedding": (set_inside(mask_token_id=V), "mask_token_id: expected an id below 128"),
    "windows of no size": (set_in(layer_types=["full_attention", "sliding_attention"]), "sliding_window"),
    "windows switched off": (set_in(layer_types=["sliding_attention"] * 2, sliding_window=9), "use_sliding_window"),
    "attention sinks": (set_inside(use_swa=True, swa_window_size=9, attention_sink_bias=True), "attention_sink_bias"),
    "selector": (set_inside(selector_rank=256, selector_top_k=16), "selector_rank"),
    "DFlash3": (set_in(architectures=["DFlash3DraftModel"]), "DFlash3DraftModel"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_dflash_head_that_does_not_fit(name: str, target: FrozenTarget, tmp_path: Path) -> None:
    does_not_fit(ZLAB, dflash(), BAD[name], target, tmp_path)


BAD_DSPARK: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "Markov head": (DEEPSPEC, {"markov_head_type": "gated"}, "expected vanilla"),
    "anchor": (SPECULATORS_DSPARK, {"sample_from_anchor": False}, "sample_from_anchor"),
    "no tables of the draft vocabulary": (SPECULATORS_DSPARK, {"draft_vocab_size": 64}, "d2t"),
}


@pytest.mark.parametrize("name", BAD_DSPARK)
def test_a_dspark_head_that_does_not_fit(name: str, target: FrozenTarget, tmp_path: Path) -> None:
    config, changes, words = BAD_DSPARK[name]
    does_not_fit(config, dspark(), (set_in(**changes), words), target, tmp_path)


BAD_DFLASH2: dict[str, tuple[Change, str]] = {
    "scaled logits": (set_inside(output_multiplier=0.5), "output_multiplier"),
    "scaled embeddings": (set_in(input_embedding_scale=8.0), "input_embedding_scale"),
    "no rank": (set_inside(selector_rank=None), "selector_rank: expected a number, found none"),
}


@pytest.mark.parametrize("name", BAD_DFLASH2)
def test_a_dflash2_head_that_does_not_fit(name: str, target: FrozenTarget, tmp_path: Path) -> None:
    does_not_fit(ZLAB2, dflash2(), BAD_DFLASH2[name], target, tmp_path)


@pytest.mark.parametrize("form", ["z-lab", "z-lab's DFlash2", "DeepSpec"])
def test_training_starts_from_a_head(form: str, target: FrozenTarget, tmp_path: Path) -> None:
    make, config = FORMS[form]
    head = make()
    path = write(tmp_path / "head", config, head.to_checkpoint())
    kind = head.__class__.__name__.lower()
    made = start_from(path, kind, {"num_anchors": 3, "gamma": 2.0, "block_size": 4}, target, torch.ones(V))
    assert (made.config.num_anchors, made.config.gamma) == (3, 2.0)
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in head.state_dict().items())
    for key, value in {"block_size": 5, "num_layers": 3, "aux_layer_ids": [1, 2, 3], "mask_token_id": 6}.items():
        assert f"head.{key}: " in refused(start_from, path, kind, {key: value}, target, torch.ones(V))


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "lilicorr", "xpress"])
@pytest.mark.parametrize("form", ["z-lab", "z-lab's DFlash2", "DeepSpec", "LiLiCorr", "XPress"])
def test_training_starts_from_a_head_of_another_kind(
    form: str, kind: str, target: FrozenTarget, tmp_path: Path
) -> None:
    make, config = FORMS[form]
    head = make()
    was = head.__class__.__name__.lower()
    path = write(tmp_path / "head", config, head.to_checkpoint())
    rows = {"num_anchors": 3, "block_size": (3 if kind == "dspark" else 4) + (was == "dspark")}
    made = start_from(path, kind, rows, target, torch.ones(V))
    assert (made.config.num_anchors, made.depth) == (3, head.depth)
    batch = target_batch(target, [[20]], head.aux_layer_ids)
    blocks = all_blocks(batch.documents)
    theirs, ours = head.state_dict(), made.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
    assert {name.split(".")[0] for name in ours} >= {"fc", "hidden_norm", "layers", "norm"}
    if was in (kind, "dflash2"):
        return
    # A new DFlash2's convolutions change nothing.
    torch.testing.assert_close(made.unroll(batch, blocks, 3).states, head.unroll(batch, blocks, 3).states)
    if was == "dflash" and kind in ("dflash2", "lilicorr"):  # a new one drafts as DFlash does
        drafts = [each.propose(seen(each, batch, "chain:3", [9]), greedy).tokens for each in (made, head)]
        assert torch.equal(*drafts)
    own = {name.split(".")[0] for name in ours.keys() - theirs.keys()} - {"layers"}
    assert all(module in made.started.split("; new: ")[1].split("; left out")[0] for module in own)
    for key, value in {"block_size": 9, "num_layers": 3, "intermediate_size": 8}.items():
        assert f"head.{key}: the head in" in refused(start_from, path, kind, {key: value}, target, torch.ones(V))
    said = refused(start_from, path, kind, {"block_size": 9}, target, torch.ones(V))
    assert f"drafts {head.depth} tokens, for which a {kind} has " in said
    assert "head.kind: " in refused(start_from, path, "medusa", {}, target, torch.ones(V))
    if was == "dflash":
        path = write(tmp_path / "causal", config | {"is_causal": True}, head.to_checkpoint())
        if kind == "dspark":
            assert "is causal, which a dspark is not" in refused(start_from, path, kind, {}, target, torch.ones(V))
        else:
            assert start_from(path, kind, {}, target, torch.ones(V)).causal


@pytest.mark.parametrize(
    ("claimed", "held", "word"),
    [
        (LILICORR, dflash, "lilicorr.anchor_norm.weight"),
        (XPRESS, lilicorr, "lilicorr.anchor_norm.weight"),
        (ZLAB, xpress, "xpress_head.down_g.weight"),
        (LILICORR | {"dflash_config": ZLAB["dflash_config"]}, lilicorr, "lilicorr_candidate_topk: exp"),
        (
            LILICORR | {"dflash_config": LILICORR["dflash_config"] | {"lilicorr_enabled": False}},
            lilicorr,
            "lilicorr_enabled: heads with such a setting",
        ),
    ],
)
def test_a_folder_that_holds_another_head_than_it_claims(
    claimed: dict[str, Any], held: Callable[..., DraftBlockHead], word: str, target: FrozenTarget, tmp_path: Path
) -> None:
    path = write(tmp_path / "head", claimed, held().to_checkpoint())
    assert word in refused(read_published, path, target)


def test_passes_of_xpress_that_are_too_few_to_draft_token_by_token(target: FrozenTarget, tmp_path: Path) -> None:
    path = write(tmp_path / "head", XPRESS | {"xpress_num_passes": 2}, xpress().to_checkpoint())
    assert any("drafts 3 tokens in 2 passes" in line for line in read_published(path, target).origin.differs)


@pytest.fixture(scope="module")
def model_dir(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the target's tokenizer, with tied embeddings."""
    folder = tmp_path_factory.mktemp("small-model")
    fresh = {"num_hidden_layers": 2, "hidden_size": 16, "tie_word_embeddings": True}
    model: Any = build_head("draft", {"fresh": fresh}, target, torch.ones(V)).model
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_plain_model_is_a_draft(model_dir: Path, target: FrozenTarget) -> None:
    expected = build_head("draft", {"path": str(model_dir)}, target, torch.ones(V))
    assert is_published(str(model_dir))
    found = open_any(str(model_dir), target)
    drafts_equal(found, expected, target)
    assert found.origin.form == "language model" and list(found.origin.files) == ["model.safetensors"]
    made = start_from(str(model_dir), "draft", {"loss": "labels"}, target, torch.ones(V))
    assert made.config.loss == "labels"
