"""Heads of other projects draft what the same weights draft in ours, and training starts from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import rms_norm

from heads.blocks.block_attention import all_blocks
from heads.parts.initial_weights import probe_target
from heads.published import is_published, open_any, read_published, start_from
from heads.registry import build_head
from heads.saved import save_head, target_record
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from tests.conftest import make_tiny_tokenizer
from tests.support import published_heads as forms
from tests.support.native_mtp import change_config, write_native
from tests.support.published_heads import D, V, block_head, comes_back, drafts_equal, eagle3, medusa, write
from tests.support.refusals import refused
from tests.support.small_heads import greedy, seen, target_batch

BLOCKS = {
    "dflash": forms.ZLAB, "dflash2": forms.ZLAB2, "dspark": forms.DEEPSPEC, "lilicorr": forms.LILICORR,
    "xpress": forms.XPRESS, "domino": forms.DOMINO,
}  # fmt: skip
"""kind -> config.json of a published head."""


def test_layers_by_number_and_the_targets_own_tensors(target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3()
    embed: Any = target.shared.embed_tokens
    weights = forms.layers_0(head.to_checkpoint()) | {"embed_tokens.weight": embed.weight.bfloat16()}
    del weights["t2d"]
    # NeMo Automodel: a prefix but for the output head, and as many layers in config.json as the target has.
    weights = {name if name in ("lm_head.weight", "d2t") else f"model.{name}": weights[name] for name in weights}
    config = forms.RAW | {"architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": 8}
    found = read_published(write(tmp_path / "automodel", config, weights), target)
    drafts_equal(found, head, target)
    assert any("make 8 layers by num_hidden_layers" in line for line in found.origin.differs)


@pytest.mark.parametrize("config", [forms.SPECULATORS_DFLASH, forms.SPECULATORS_DSPARK], ids=["dflash", "dspark"])
def test_a_draft_vocabulary_of_a_block_is_of_rows_of_the_targets_output_head(
    config: dict[str, Any], target: FrozenTarget, tmp_path: Path
) -> None:
    head, config = block_head(config["speculators_model_type"], draft_vocab_size=48), config | {"draft_vocab_size": 48}
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    weights = {**head.to_checkpoint(), "lm_head.weight": target.lm_head_weight[head.draft_to_target]}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in weights:
            weights[name] = weights[name][order]
    weights["d2t"] = head.draft_to_target[order] - torch.arange(48)
    path = write(tmp_path / "head", config, weights)
    drafts_equal(read_published(path, target), head, target)
    for kind in ("dflash", "dspark", "lilicorr"):
        assert "measured, not trained" in refused(start_from, path, kind, {}, target, torch.ones(V))
    weights["lm_head.weight"] = weights["lm_head.weight"] * 2
    path = write(tmp_path / "other", config, weights)
    assert "lm_head.weight is not the target's own" in refused(read_published, path, target)


@pytest.mark.parametrize("size", [V, None])
def test_the_targets_output_head_is_borrowed(size: int | None, target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3(draft_vocab_size=V)
    head.lm_head.weight.data.copy_(target.lm_head_weight)
    weights = head.to_checkpoint()
    del weights["lm_head.weight"]
    found = read_published(write(tmp_path / "raw", forms.RAW | {"draft_vocab_size": size}, weights), target)
    drafts_equal(found, head, target)
    assert any("borrows the target's output head only" in line for line in found.origin.differs) is (size == V)
    (tmp_path / "raw/config.json").write_text(json.dumps(forms.RAW | {"draft_vocab_size": None}))
    save_file(head.to_checkpoint(), tmp_path / "raw/model.safetensors")
    assert "takes the target's output head" in read_published(str(tmp_path / "raw"), target).origin.differs[0]


@pytest.mark.parametrize("name", ["input_layernorm", "hidden_norm"])
def test_each_engine_names_the_norm_of_a_further_layer_its_way(name: str, target: FrozenTarget, tmp_path: Path) -> None:
    head, config = eagle3(num_layers=2), forms.RAW | {"num_hidden_layers": 2}
    weights = head.to_checkpoint()
    left = weights.pop(f"layers.1.{name}.weight")
    found = read_published(write(tmp_path / "raw", config, weights), target)
    drafts_equal(found, head, target)
    assert [name in line for line in found.origin.differs] == [True]
    weights[f"layers.1.{name}.weight"] = left + 1
    assert "differ" in refused(read_published, write(tmp_path / "two", config, weights), target)


def test_a_pickle_is_read_only_by_its_name(target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3()
    path = write(tmp_path, forms.RAW, head.to_checkpoint(), "pytorch_model.bin")
    assert f"{path}/pytorch_model.bin" in refused(read_published, path, target)
    drafts_equal(read_published(f"{path}/pytorch_model.bin", target), head, target)
    (tmp_path / "pytorch_model.bin").unlink()
    torch.save({"fc.weight": Path("code")}, tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin" in refused(read_published, f"{path}/pytorch_model.bin", target)


@pytest.mark.parametrize("form", ["safetensors", "pickle", "prefixed", "vLLM"])
def test_medusas_layouts(form: str, target: FrozenTarget, tmp_path: Path) -> None:
    head, file = medusa(), "medusa_lm_head.pt" if form == "pickle" else "medusa_lm_head.safetensors"
    weights = head.to_checkpoint()
    config: dict[str, Any] = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    if form == "prefixed":
        weights = {f"medusa_head.{name}": value for name, value in weights.items()}
    if form == "vLLM":
        file, config = "model.safetensors", {"num_heads": 3, "model_type": "medusa"}
        weights = {
            f"lm_heads.{name[0]}.weight" if name[2] == "1" else f"blocks.{name[0]}.layers.{name[2]}.{name[11:]}": value
            for name, value in weights.items()
        }
    path = write(tmp_path / "head", config, weights, file)
    found = read_published(f"{path}/{file}" if form == "pickle" else path, target)
    drafts_equal(found, head, target)
    comes_back(found, tmp_path, target)


@pytest.mark.parametrize("family", ["mimo", "deepseek", "qwen"])
def test_a_folder_of_a_targets_modules(family: str, tmp_path: Path) -> None:
    write_native(tmp_path / "target", family)
    target = load_target(str(tmp_path / "target"), dtype=torch.float32)
    head = build_head("mtp", {"native": True}, target, torch.ones(V))
    save_head(head, tmp_path / "head", target=target_record(target))
    config = json.loads((tmp_path / "head/config.json").read_text())
    del config["draftsmith"]
    path = write(tmp_path / "theirs", config, head.to_checkpoint())
    drafts_equal(read_published(path, target), head, target)
    drafts_equal(read_published(str(tmp_path / "target"), target), head, target)  # the whole checkpoint
    change_config(tmp_path / "theirs", num_hidden_layers=2)
    refused(read_published, path, target)


def test_confidence_that_does_not_look_at_the_token_before(target: FrozenTarget, tmp_path: Path) -> None:
    head = block_head("dspark")
    with torch.no_grad():
        head.confidence_head.proj.weight[:, D:] = 0
    weights = head.to_checkpoint()
    weights["confidence_head.proj.weight"] = weights["confidence_head.proj.weight"][:, :D]
    path = write(tmp_path / "head", forms.DEEPSPEC | {"confidence_head_with_markov": False}, weights)
    drafts_equal(read_published(path, target), head, target)


def test_a_plain_model_is_a_draft(target: FrozenTarget, tmp_path: Path) -> None:
    """A smaller model of the target's tokenizer, with tied embeddings."""
    fresh = {"num_hidden_layers": 2, "hidden_size": 16, "tie_word_embeddings": True}
    path, model = str(tmp_path), build_head("draft", {"fresh": fresh}, target, torch.ones(V)).model
    model.save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    assert is_published(path)
    found = open_any(path, target)
    drafts_equal(found, build_head("draft", {"path": path}, target, torch.ones(V)), target)
    assert found.origin.form == "language model" and list(found.origin.files) == ["model.safetensors"]
    assert start_from(path, "draft", {"loss": "labels"}, target, torch.ones(V)).config.loss == "labels"


STARTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("eagle3", {"depth": 3}, {"draft_vocab_size": 64, "fc_norm": True, "aux_layer_ids": [1, 2, 3], "rope_theta": 5.0}),
    *(
        (kind, {"gamma": 2.0}, {"block_size": 5, "num_layers": 3, "aux_layer_ids": [1, 2, 3], "mask_token_id": 6})
        for kind in ("dflash", "dflash2", "dspark")
    ),
]
"""kind, settings of the training, settings that differ from the head's."""


@pytest.mark.parametrize(("kind", "training", "others"), STARTS, ids=[row[0] for row in STARTS])
@pytest.mark.parametrize("ours", [True, False])
def test_training_starts_from_a_head(
    kind: str, training: dict[str, Any], others: dict[str, Any], ours: bool, target: FrozenTarget, tmp_path: Path
) -> None:
    head: Any = eagle3(depth=4) if kind == "eagle3" else block_head(kind)
    if ours:
        save_head(head, tmp_path, target=target_record(target))
    else:
        write(tmp_path, BLOCKS.get(kind, forms.RAW), head.to_checkpoint())
    made = start_from(str(tmp_path), kind, training, target, torch.ones(V))
    assert all(getattr(made.config, key) == value for key, value in training.items())
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in head.state_dict().items())
    for key, value in others.items():
        assert f"head.{key}: " in refused(start_from, str(tmp_path), kind, {key: value}, target, torch.ones(V))
    assert "head.kind: " in refused(start_from, str(tmp_path), "mtp", {}, target, torch.ones(V))
    assert open_any(str(tmp_path), target).aux_layer_ids == head.aux_layer_ids


def test_a_head_of_eagle_3_1_goes_on_in_the_plain_form(target: FrozenTarget, tmp_path: Path) -> None:
    """States of the size that `fc_norm` was to even out are fused as before."""
    head = eagle3(fc_norm=True, norm_output=True)
    save_head(head, tmp_path, target=target_record(target))
    plain = {"fc_norm": False, "norm_output": False}
    made = start_from(str(tmp_path), "eagle3", plain, target, torch.ones(V))
    assert not made.config.fc_norm and not made.config.norm_output and "without fc_norm and norm_output" in made.started
    assert made.to_checkpoint().keys() == eagle3().to_checkpoint().keys()
    scales = probe_target(target, head.aux_layer_ids, torch.ones(V), closely=False).scales
    sized = [rms_norm(torch.randn(5, D), (D,)) * scale for scale in scales]
    torch.testing.assert_close(made.fuse(torch.cat(sized, -1)), head.fuse(torch.cat(sized, -1)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("was", "kind"),
    [
        *(("dflash", kind) for kind in BLOCKS if kind != "dflash"),
        *((kind, "dflash") for kind in BLOCKS if kind != "dflash"),
        ("lilicorr", "dflash2"),
        ("dspark", "xpress"),
    ],
)
def test_training_starts_from_a_head_of_another_kind(was: str, kind: str, target: FrozenTarget, tmp_path: Path) -> None:
    head, config = block_head(was), BLOCKS[was]
    path = write(tmp_path / "head", config, head.to_checkpoint())
    rows = {"num_anchors": 3, "block_size": (3 if kind == "dspark" else 4) + (was == "dspark")}
    rows |= {"shift_label": False} if kind == "domino" else {}  # rows that draft what DFlash's do
    made = start_from(path, kind, rows, target, torch.ones(V))
    assert (made.config.num_anchors, made.depth) == (3, head.depth)
    theirs, ours = head.state_dict(), made.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
    assert {name.split(".")[0] for name in ours} >= {"fc", "hidden_norm", "layers", "norm"}
    own = {name.split(".")[0] for name in ours.keys() - theirs.keys()} - {"layers"}
    assert all(module in made.started.split("; new: ")[1].split("; left out")[0] for module in own)
    batch = target_batch(target, [[20]], head.aux_layer_ids)
    if was != "dflash2":  # a new one's convolutions change nothing
        blocks = all_blocks(batch.documents)
        torch.testing.assert_close(made.unroll(batch, blocks, 3).states, head.unroll(batch, blocks, 3).states)
    if was == "dflash" and kind in ("dflash2", "lilicorr", "domino"):  # a new one drafts as DFlash does
        drafts = [each.propose(seen(each, batch, "chain:3", [9]), greedy).tokens for each in (made, head)]
        assert torch.equal(*drafts)
    for key, value in {"block_size": 9, "num_layers": 3, "intermediate_size": 8}.items():
        assert f"head.{key}: the head in" in refused(start_from, path, kind, {key: value}, target, torch.ones(V))
    said = refused(start_from, path, kind, {"block_size": 9}, target, torch.ones(V))
    assert f"drafts {head.depth} tokens, for which a {kind} has " in said
    if was == "dflash":
        path = write(tmp_path / "causal", config | {"is_causal": True}, head.to_checkpoint())
        if kind == "dspark":
            assert "is causal, which a dspark is not" in refused(start_from, path, kind, {}, target, torch.ones(V))
        else:
            assert start_from(path, kind, {}, target, torch.ones(V)).config.causal
