"""Heads in other projects' forms draft what the same weights draft in ours, and whatever does not fit is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.published import is_published, open_any, read_published, start_from
from heads.registry import build_head
from heads.saved import load_head, save_head, target_record
from heads.targets.load import load_target
from heads.targets.model import FrozenTarget
from tests.heads.published_heads import LLAMA3, RAW, SPECULATORS, D, V, eagle3, layers_0, medusa, write
from tests.heads.small_heads import greedy, seen, target_batch
from tests.native_mtp import change_config, write_native
from tests.refusals import refused

IDS = "eagle_aux_hidden_state_layer_ids"
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def drafts_equal(found: Any, expected: Any, target: FrozenTarget) -> None:
    """Tensors, settings, and drafts with their scores."""
    assert found.config == expected.config
    ours, theirs = expected.to_checkpoint(), found.to_checkpoint()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    proposals = []
    for head in (found, expected):
        batch = target_batch(target, [[20], [20]], head.aux_layer_ids)
        state = seen(head, batch, "chain:3", [9, 14])
        proposals.append(head.propose(state, greedy))
    assert torch.equal(proposals[0].tokens, proposals[1].tokens)
    assert torch.equal(proposals[0].scores, proposals[1].scores)


def raw(**changes: Any) -> dict[str, Any]:
    return RAW | changes


def test_a_raw_head_is_read_by_the_engines_defaults(target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3()
    path = write(tmp_path / "raw", raw(), head.to_checkpoint())
    assert is_published(path)
    found = read_published(path, target)
    drafts_equal(found, head, target)
    assert found.origin.form == "raw EAGLE-3" and found.origin.differs == ()
    assert list(found.origin.files) == ["model.safetensors"]


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"attention_factor": 1.5}
PART = {"rope_type": "default", "partial_rotary_factor": 0.25}
ODD: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    ("nested", {"aux_layer_ids": (1, 3, 6)}, {"eagle_config": {IDS: [0, 2, 5], "use_aux_hidden_state": True}}, True),
    ("embeddings and the last", {"aux_layer_ids": (0, 8)}, {"eagle_config": {IDS: [-1, 7]}}, True),
    ("contradicting", {"aux_layer_ids": (1, 3, 6)}, {IDS: [1, 3, 6], "eagle_config": {IDS: [1, 3, 6]}}, True),
    ("many layers", {}, {"num_hidden_layers": 36}, True),
    ("parameters", {"rope_theta": 7e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, False),
    ("scaling", {"rope_theta": 7e4, "rope_scaling": LLAMA3}, {"rope_theta": 7e4, "rope_scaling": LLAMA3}, False),
    ("sections", {}, {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, False),
    ("part", {"rope_scaling": PART}, {"rope_scaling": PART | {"mrope_section": [1, 0, 0]}}, True),
    ("factor", {"rope_scaling": YARN}, {"rope_scaling": YARN}, True),
    ("window", {"sliding_window": 9}, {"sliding_window": 9, "layer_types": ["sliding_attention"]}, True),
    ("window of no layer", {}, {"sliding_window": 9, "layer_types": ["full_attention"]}, False),
    ("EAGLE-3.1", {"fc_norm": True, "norm_output": True}, {"fc_norm": True, "norm_output": True}, False),
    ("norm of all", {"norm_before_fc": True}, {"norm_before_fc": True}, False),
    ("residual", {"norm_before_residual": True}, {"norm_before_residual": True}, True),
    ("architecture", {}, {"architectures": ["LlamaForCausalLM"]}, True),
]


@pytest.mark.parametrize(("settings", "config", "differs"), [odd[1:] for odd in ODD], ids=[odd[0] for odd in ODD])
def test_oddities_of_a_raw_head(
    settings: dict[str, Any], config: dict[str, Any], differs: bool, target: FrozenTarget, tmp_path: Path
) -> None:
    head = eagle3(**settings)
    found = read_published(write(tmp_path / "raw", raw(**config), head.to_checkpoint()), target)
    drafts_equal(found, head, target)
    assert bool(found.origin.differs) is differs


def test_layers_by_number_and_the_targets_own_tensors(target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3()
    embed: Any = target.shared.embed_tokens
    weights = layers_0(head.to_checkpoint()) | {"embed_tokens.weight": embed.weight.bfloat16()}
    del weights["t2d"]
    found = read_published(write(tmp_path / "nvidia", raw(), weights), target)
    drafts_equal(found, head, target)


def test_a_draft_vocabulary_in_any_order_is_read(target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3()
    weights, order = head.to_checkpoint(), torch.randperm(48, generator=torch.Generator().manual_seed(2))
    weights |= {"d2t": head.kept[order] - torch.arange(48), "lm_head.weight": head.lm_head.weight[order]}
    drafts_equal(read_published(write(tmp_path / "raw", raw(), weights), target), head, target)


@pytest.mark.parametrize("tables", [False, True])
def test_a_whole_vocabulary_needs_no_tables(tables: bool, target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3(draft_vocab_size=V)
    weights = head.to_checkpoint()
    if tables:
        weights |= {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    found = read_published(write(tmp_path / "raw", raw(draft_vocab_size=V), weights), target)
    drafts_equal(found, head, target)
    assert bool(found.origin.differs) is tables


@pytest.mark.parametrize("size", [V, None])
def test_the_targets_output_head_is_borrowed(size: int | None, target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3(draft_vocab_size=V)
    head.lm_head.weight.data.copy_(target.lm_head_weight)
    weights = head.to_checkpoint()
    del weights["lm_head.weight"]
    found = read_published(write(tmp_path / "raw", raw(draft_vocab_size=size), weights), target)
    drafts_equal(found, head, target)
    assert any("borrows the target's output head only" in line for line in found.origin.differs) is (size == V)
    (tmp_path / "raw/config.json").write_text(json.dumps(raw(draft_vocab_size=None)))
    save_file(head.to_checkpoint(), tmp_path / "raw/model.safetensors")
    assert "takes the target's output head" in read_published(str(tmp_path / "raw"), target).origin.differs[0]


WIDE: dict[str, Any] = {"own_embeddings": True, "target_hidden_size": D}


@pytest.mark.parametrize("width", [24, 48])
def test_a_head_of_another_width_than_its_target(width: int, target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3(hidden_size=width, norm_before_fc=True, **WIDE)
    config = raw(hidden_size=width, target_hidden_size=D, norm_before_fc=True)
    found = read_published(write(tmp_path / "raw", config, head.to_checkpoint()), target)
    drafts_equal(found, head, target)
    assert found.origin.differs == ()
    comes_back(found, tmp_path, target)


@pytest.mark.parametrize(
    ("lacking", "config", "words"),
    [
        ("embed_tokens.weight", {}, "embed_tokens.weight: expected one of width 24, the target's has 32"),
        ("lm_head.weight", {"draft_vocab_size": V}, "lm_head.weight: expected one of width 24, the target's has 32"),
        ("", {"target_hidden_size": 40}, "made for a target with width 40, but"),
        ("", {"target_hidden_size": None}, "made for a target with width 24, but"),
    ],
)
def test_a_head_of_another_width_that_does_not_fit(
    lacking: str, config: dict[str, Any], words: str, target: FrozenTarget, tmp_path: Path
) -> None:
    weights = eagle3(hidden_size=24, draft_vocab_size=config.get("draft_vocab_size", 48), **WIDE).to_checkpoint()
    weights.pop(lacking, None)
    path = write(tmp_path / "raw", raw(hidden_size=24, target_hidden_size=D) | config, weights)
    assert words in refused(read_published, path, target)


@pytest.mark.parametrize("name", ["input_layernorm", "hidden_norm"])
def test_each_engine_has_its_own_name_for_the_norm_before_a_further_layer(
    name: str, target: FrozenTarget, tmp_path: Path
) -> None:
    head = eagle3(num_layers=2)
    weights = head.to_checkpoint()
    left = weights.pop(f"layers.1.{name}.weight")
    config = raw(num_hidden_layers=2)
    found = read_published(write(tmp_path / "raw", config, weights), target)
    drafts_equal(found, head, target)
    assert [name in line for line in found.origin.differs] == [True]
    weights[f"layers.1.{name}.weight"] = left + 1
    assert "differ" in refused(read_published, write(tmp_path / "two", config, weights), target)


def test_embeddings_of_its_own_are_read_and_saved(target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3(own_embeddings=True)
    found = read_published(write(tmp_path / "raw", raw(), head.to_checkpoint()), target)
    drafts_equal(found, head, target)
    assert found.embed_tokens is not None and not found.embed_tokens.weight.requires_grad
    assert "embeddings" in found.origin.differs[0]
    comes_back(found, tmp_path, target)


def test_a_pickle_is_read_only_by_its_name(target: FrozenTarget, tmp_path: Path) -> None:
    head = eagle3()
    path = write(tmp_path / "bin", raw(architectures=["LlamaForCausalLM"]), head.to_checkpoint(), "pytorch_model.bin")
    assert f"{path}/pytorch_model.bin" in refused(read_published, path, target)
    drafts_equal(read_published(f"{path}/pytorch_model.bin", target), head, target)
    (tmp_path / "bin/pytorch_model.bin").unlink()
    torch.save({"fc.weight": Path("code")}, tmp_path / "bin/pytorch_model.bin")
    assert "pytorch_model.bin" in refused(read_published, f"{path}/pytorch_model.bin", target)


def test_what_speculators_trains_by_default(target: FrozenTarget, tmp_path: Path) -> None:
    settings = {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True}
    head = eagle3(aux_layer_ids=(1, 3, 6), sliding_window=9, rope_scaling=LLAMA3, **settings)
    layer = SPECULATORS["transformer_layer_config"] | {"sliding_window": 9, "layer_types": ["sliding_attention"]}
    config = SPECULATORS | settings | {"transformer_layer_config": layer}
    embed: Any = target.shared.embed_tokens
    weights = layers_0(head.to_checkpoint()) | {"embed_tokens.weight": embed.weight}
    found = read_published(write(tmp_path / "head", config, weights), target)
    drafts_equal(found, head, target)
    assert any("speculators" in line for line in found.origin.differs)


def test_the_normed_state_is_the_residual() -> None:
    head, plain = eagle3(norm_before_residual=True).midlayer, eagle3().midlayer
    embedding, state = torch.randn(2, 1, 5, D)
    turn = torch.ones(1, 1, 5, 8), torch.zeros(1, 1, 5, 8)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.zeros_like(q)

    normed = head.hidden_norm(state)
    assert torch.equal(head(embedding, state, turn, attend), normed + head.mlp(head.post_attention_layernorm(normed)))
    assert torch.equal(plain(embedding, state, turn, attend), state + plain.mlp(plain.post_attention_layernorm(state)))


def theirs_of_vllm(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"lm_heads.{name[0]}.weight" if name[2] == "1" else f"blocks.{name[0]}.layers.{name[2]}.{name[11:]}": value
        for name, value in weights.items()
    }


@pytest.mark.parametrize("form", ["safetensors", "pickle", "prefixed", "vLLM"])
def test_medusas_layouts(form: str, target: FrozenTarget, tmp_path: Path) -> None:
    head, file = medusa(), "medusa_lm_head.safetensors"
    weights = head.to_checkpoint()
    config: dict[str, Any] = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    if form == "pickle":
        file = "medusa_lm_head.pt"
    if form == "prefixed":
        weights = {f"medusa_head.{name}": value for name, value in weights.items()}
    if form == "vLLM":
        weights, file, config = theirs_of_vllm(weights), "model.safetensors", {"num_heads": 3}
        config |= {"model_type": "medusa"}
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


def comes_back(found: Any, tmp_path: Path, target: FrozenTarget) -> None:
    """Save a head in our form, read it, and read it again as if another project had saved it."""
    save_head(found, tmp_path / "ours", target=target_record(target))
    assert not is_published(str(tmp_path / "ours"))
    drafts_equal(load_head(tmp_path / "ours"), found, target)
    record = json.loads((tmp_path / "ours/config.json").read_text())
    del record["draftsmith"]
    (tmp_path / "ours/config.json").write_text(json.dumps(record))
    drafts_equal(read_published(str(tmp_path / "ours"), target), found, target)


def set_in(**changes: Any) -> Change:
    return lambda config, weights: config.update(changes)


BAD: dict[str, tuple[Change, str]] = {
    "missing": (lambda config, weights: weights.pop("norm.weight"), "norm.weight"),
    "extra": (lambda config, weights: weights.update(strange=torch.ones(2)), "strange"),
    "ids outside the vocabulary": (lambda config, weights: weights["d2t"].add_(V), "d2t"),
    "width": (set_in(hidden_size=64, head_dim=16), "width"),
    "layers": (set_in(eagle_config={IDS: [1, 7, 30]}), "layers"),
    "activation": (set_in(hidden_act="gelu"), "hidden_act"),
    "no object": (set_in(transformer_layer_config=[1]), "config.json"),
}


def does_not_fit(
    config: dict[str, Any], head: Any, case: tuple[Change, str], target: FrozenTarget, tmp_path: Path
) -> None:
    """A folder of the head, changed, is refused by its path and a word."""
    config, weights = dict(config), {key: value.clone() for key, value in head.to_checkpoint().items()}
    change, words = case
    change(config, weights)
    path = write(tmp_path / "head", config, weights)
    text = refused(read_published, path, target)
    assert path in text and words in text


@pytest.mark.parametrize("name", BAD)
def test_a_raw_head_that_does_not_fit(name: str, target: FrozenTarget, tmp_path: Path) -> None:
    does_not_fit(RAW, eagle3(), BAD[name], target, tmp_path)


def test_a_model_that_is_no_head(target: FrozenTarget, tmp_path: Path) -> None:
    path = write(tmp_path / "encoder", {"architectures": ["BertModel"]}, {"x": torch.ones(2)})
    assert "eagle3" in refused(read_published, path, target)


@pytest.mark.parametrize("ours", [True, False])
def test_training_starts_from_a_head(ours: bool, target: FrozenTarget, tmp_path: Path) -> None:
    head, path = eagle3(depth=4), str(tmp_path / "head")
    if ours:
        save_head(head, path, target=target_record(target))
    else:
        write(tmp_path / "head", raw(), head.to_checkpoint())
    made = start_from(path, "eagle3", {"depth": 3, "draft_vocab_size": 48}, target, torch.ones(V))
    assert made.config.depth == 3 and made.config.depth_decay == 0.8
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in head.state_dict().items())
    for key, value in {"draft_vocab_size": 64, "fc_norm": True, "aux_layer_ids": [1, 2, 3], "rope_theta": 5.0}.items():
        assert f"head.{key}: " in refused(start_from, path, "eagle3", {key: value}, target, torch.ones(V))
    assert "head.kind: " in refused(start_from, path, "mtp", {}, target, torch.ones(V))
    assert open_any(path, target).config.aux_layer_ids == (2, 4, 5)
