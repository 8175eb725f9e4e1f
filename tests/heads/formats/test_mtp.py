"""Native modules of multi-token prediction: read from the target's files, run, and saved back bit for bit."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from heads.core.engines import SGLANG, VLLM
from heads.registry import build_head
from heads.saved import load_head, save_head, target_record
from heads.targets.cache import cache_name
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from tests.heads.formats.test_engine_folder import serving, verdicts
from tests.heads.methods.test_mtp import plain_states, rms
from tests.heads.methods.test_state_recycling import scores_are_those_of_training
from tests.support.closeness import assert_close
from tests.support.native_mtp import V, change_config, change_weights, write_native
from tests.support.refusals import refused
from tests.support.small_heads import target_batch

COUNTS = torch.arange(V)


Targets = dict[str, tuple[FrozenTarget, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """family and number of modules -> the target in float64 and its modules' tensors."""
    made: Targets = {}
    for name in NAMES:
        family, modules = name[:-1], int(name[-1])
        folder = tmp_path_factory.mktemp(name)
        native = write_native(folder, family, modules=modules, dtype=torch.bfloat16)
        target = load_target(str(folder))
        target.model.double()  # after its check: the grouped kernels of experts know no float64
        if family not in ("mimo", "qwen_dense"):
            untyped: Any = target.model
            untyped.set_experts_implementation("eager")
        made[name] = (target, {key: value.float() for key, value in native.items()})
    return made


NAMES: dict[str, set[str]] = {
    "mimo1": {VLLM},
    "mimo2": set(),
    "deepseek1": {VLLM, SGLANG},
    "deepseek2": {VLLM},
    "glm1": {VLLM, SGLANG},
    "glm_flash1": {SGLANG},
    "qwen1": {VLLM, SGLANG},
    "qwen_fused1": {VLLM, SGLANG},
    "qwen_dense1": {VLLM, SGLANG},
}
"""family and number of modules -> engines that load them."""


@pytest.mark.parametrize("name", NAMES)
def test_the_checkpoints_modules_come_back_bit_for_bit(name: str, targets: Targets, tmp_path: Path) -> None:
    """And lie beside their target's own config.json, as engines read them."""
    target, native = targets[name]
    head = build_head("mtp", {"native": True}, target, COUNTS)
    save_head(head, tmp_path / "head", target=target_record(target))
    ours, theirs = (json.loads((Path(at) / "config.json").read_text()) for at in (tmp_path / "head", target.name))
    for key in ("architectures", "model_type", "num_hidden_layers", "vocab_size", "hidden_size"):
        assert ours[key] == theirs[key], key
    found = verdicts(tmp_path / "head")
    assert serving(found) == NAMES[name] and not any(verdict.errors for verdict in found.values())
    if NAMES[name] == {VLLM, SGLANG}:
        assert '"method": "mtp"' in found[VLLM].command and "--speculative-algorithm NEXTN" in found[SGLANG].command
    saved, whole = load_file(tmp_path / "head/model.safetensors"), load_file(Path(target.name) / "model.safetensors")
    assert saved.keys() == native.keys()
    for key, value in saved.items():
        assert torch.equal(value, whole[key]) and value.dtype == whole[key].dtype, key
    again = load_head(tmp_path / "head")
    assert again.config == head.config
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in head.state_dict().items())


def test_a_checkpoints_modules_are_rounded_to_its_own_dtypes(targets: Targets, tmp_path: Path) -> None:
    target, _ = targets["qwen_fused1"]
    head = build_head("mtp", {"native": True}, target, COUNTS).float()
    with torch.no_grad():
        for value in head.parameters():
            value.mul_(1 + 2.0**-12)  # no longer exact in bfloat16
    head.round_to(torch.float32)
    save_head(head, tmp_path, target=target_record(target), dtype=torch.float32)
    saved, whole = load_file(tmp_path / "model.safetensors"), load_file(Path(target.name) / "model.safetensors")
    assert all(value.dtype == whole[name].dtype for name, value in saved.items())
    again = load_head(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in head.state_dict().items())


def test_a_head_with_other_tensors_is_refused(targets: Targets, tmp_path: Path) -> None:
    target, _ = targets["qwen_fused1"]
    save_head(build_head("mtp", {"native": True}, target, COUNTS), tmp_path, target=target_record(target))
    change_weights(tmp_path, mtp__layers__0__mlp__experts__down_proj=torch.zeros(4, 16, 32))
    assert "tensor mtp.layers.0.mlp.experts" in refused(load_head, tmp_path)


@pytest.mark.parametrize("name", ["qwen1", "qwen_fused1", "qwen_dense1"])
def test_qwens_states_are_those_of_a_layer_of_transformers(name: str, targets: Targets) -> None:
    """Embedding first, norms that store their scale less one, the family's own layer behind the projection."""
    target, native = targets[name]
    head = build_head("mtp", {"native": True}, target, COUNTS).double()
    assert head.config.layout == "qwen"
    batch, T = target_batch(target, [[18], [18]]), 17
    own = {key.removeprefix("mtp."): value.double() for key, value in native.items()}

    scale = {key: 1 + value for key, value in own.items()}
    both = [
        rms(batch.embeddings[:, 1:], scale["pre_fc_norm_embedding.weight"], 1e-6),
        rms(batch.hidden[:, :T], scale["pre_fc_norm_hidden.weight"], 1e-6),
    ]
    block = {key.removeprefix("layers.0."): value for key, value in own.items() if key.startswith("layers.0.")}
    if name == "qwen1":
        experts = [[block.pop(f"mlp.experts.{e}.{n}_proj.weight") for n in ("gate", "up", "down")] for e in range(4)]
        block["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        block["mlp.experts.down_proj"] = torch.stack([down for *_, down in experts])
    decoder: Any = copy.deepcopy(target.base)
    decoder.config._attn_implementation = "eager"
    decoder.layers[0].load_state_dict(block)
    mask = torch.full((T, T), -1e9, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        x = torch.cat(both, -1) @ own["fc.weight"].T
        grid = (3, -1, -1) if hasattr(decoder.rotary_emb, "mrope_section") else (-1, -1)
        cos_sin = decoder.rotary_emb(x, batch.positions[:, :T].expand(*grid))
        x = decoder.layers[0](x, position_embeddings=cos_sin, attention_mask=mask)
        ours = head.unroll(batch, 1)[0][:, :T]
    assert_close(
        ours, rms(x, scale["norm.weight"], 1e-6), roundings=16, precision=torch.float32
    )  # their norms compute in float32


@pytest.mark.parametrize("name", ["deepseek1", "deepseek2", "glm1", "glm_flash1"])
def test_deepseeks_states_are_those_of_transformers(name: str, targets: Targets) -> None:
    """Module by module, against the class with which transformers drafts."""
    target, native = targets[name]
    head = build_head("mtp", {"native": True}, target, COUNTS).double()
    batch, count = target_batch(target, [[18], [18]]), head.num_modules
    target.model.config.num_mtp_layers, target.model.config.mtp_mlp_layer_types = count, ["sparse"] * count
    theirs: Any = MtpModel(target.model, count)
    theirs.set_attn_implementation("eager")
    theirs.set_experts_implementation("eager")
    names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head": "post_norm"}
    for i in range(count):
        prefix = f"model.layers.{3 + i}."
        own = {key.removeprefix(prefix): value for key, value in native.items() if key.startswith(prefix)}
        state = {}
        for key, value in own.items():
            first, _, rest = key.partition(".")
            if first in names:
                state[f"{names[first]}.{rest.removeprefix('norm.')}"] = value
            elif "experts." not in key or "shared" in key:
                state[f"mtp_block.{key}"] = value
        experts = [[own[f"mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")] for e in range(4)]
        state["mtp_block.mlp.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        state["mtp_block.mlp.experts.down_proj"] = torch.stack([down for *_, down in experts])
        theirs.layers[i].load_state_dict(state)
    theirs.double()
    hidden = batch.hidden
    with torch.no_grad():
        for k, ours in enumerate(head.unroll(batch, count), start=1):
            T = 18 - k
            embedded, hidden = theirs.embed_tokens(batch.tokens[:, k:]), hidden[:, :T]
            positions = batch.positions[:, :T]
            if k == 1:
                embedded[:, 0] = 0  # as vLLM's class does, and transformers' does not
            mask = torch.full((T, T), -1e9, dtype=torch.float64).triu(1)[None, None]
            cos_sin = theirs.rotary_emb(hidden, positions)
            layer = theirs.layers[k - 1]
            hidden = layer(embedded, hidden, cos_sin, mask, positions, **{cache_name(layer): None})
            assert_close(ours[:, :T], hidden, precision=torch.float32)  # their norms compute in float32


@pytest.mark.parametrize("name", ["mimo1", "mimo2"])
def test_mimos_states_are_the_papers_formula(name: str, targets: Targets) -> None:
    """Before the target's final norm, and with biases in the attention."""
    target, native = targets[name]
    head = build_head("mtp", {"native": True}, target, COUNTS).double()
    batch = target_batch(target, [[18], [18]], head.aux_layer_ids)
    norm: Any = target.base.norm
    assert_close(norm(batch.aux_hidden_states), batch.hidden, precision=torch.float32)
    of_block = r"\.(self_attn|mlp|input_layernorm|post_attention_layernorm)\."
    own = {re.sub(of_block, r".block.\1.", key.removeprefix("model.")): value.double() for key, value in native.items()}
    expected = plain_states(head.config, replace(batch, hidden=batch.aux_hidden_states), own)
    for ours, plain in zip(head.unroll(batch, head.num_modules), expected, strict=False):
        there = ~plain.isnan().any(-1)
        assert_close(ours[there], plain[there], precision=torch.float32)  # their norms compute in float32


@pytest.mark.parametrize("name", NAMES)
def test_a_drafting_step_is_a_training_step(name: str, targets: Targets) -> None:
    """Of blocks whose attention is the target's own."""
    target, _ = targets[name]
    head = build_head("mtp", {"native": True, "draft_vocab_size": 90}, target, COUNTS).double()
    batch = target_batch(target, [[20], [20]], head.aux_layer_ids)
    scores_are_those_of_training(head, batch, "chain:6", [11, 13], tolerance=1e-4)


SHARED = "model__layers__3__"


@pytest.mark.parametrize(
    ("family", "change", "config", "words"),
    [
        ("mimo", {"model__mtp_layers__0__input_proj__weight": None}, {}, "(looked for model.mtp_layers.0.input_proj, "),
        ("mimo", {}, {"num_nextn_predict_layers": 2}, "promises 2 modules of multi-token prediction, its files hold 1"),
        ("deepseek", {f"{SHARED}shared_head__head__weight": torch.zeros(128, 32)}, {}, "is not the target's own"),
        (
            *("deepseek", {f"{SHARED}eh_proj__weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)}, {}),
            "eh_proj.weight is torch.float8_e4m3fn; expected a checkpoint whose modules are not quantised",
        ),
    ],
)
def test_modules_that_cannot_be_used_are_named(
    family: str, change: dict[str, Tensor | None], config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_native(tmp_path, family)
    change_weights(tmp_path, **change)
    change_config(tmp_path, **config)
    said = refused(build_head, "mtp", {"native": True}, load_target(str(tmp_path)), COUNTS)
    assert words in said and str(tmp_path) in said
