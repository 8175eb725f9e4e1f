"""Random heads for the tiny target, and folders of them in the forms of other projects."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.methods.eagle3 import Eagle3, Eagle3Config
from heads.methods.medusa import Medusa, MedusaConfig
from heads.parts.vocab import build_vocab
from heads.published import is_published, read_published
from heads.registry import HEADS
from heads.saved import load_head, save_head, target_record
from heads.targets.frozen_target import FrozenTarget
from tests.support.small_heads import BLOCK_HEADS, greedy, randomised, seen, target_batch

D, V, LAYERS = 32, 128, 8
"""Of the tiny target."""
BLOCK: dict[str, Any] = dict(
    hidden_size=D, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5,
    vocab_size=V, max_position_embeddings=64,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)


def eagle3(**changes: Any) -> Eagle3:
    """A random EAGLE-3 head of the tiny target."""
    settings = {"aux_layer_ids": (2, 4, 5), "draft_vocab_size": 48, "rope_theta": 10_000.0, **changes}
    config = Eagle3Config(**BLOCK | {"num_target_layers": LAYERS} | settings)
    counts = torch.randint(0, 9, (V,), generator=torch.Generator().manual_seed(0))
    made: Eagle3 = randomised(Eagle3(config, build_vocab(counts, config.draft_vocab_size)), 0.2)
    return made


def medusa(**changes: Any) -> Medusa:
    """Random Medusa heads of the tiny target."""
    config = MedusaConfig(**{"hidden_size": D, "vocab_size": V, "draft_vocab_size": V, "depth": 3, **changes})
    made: Medusa = randomised(Medusa(config, torch.arange(config.draft_vocab_size)), 0.2)
    return made


BLOCKS: dict[str, Any] = BLOCK | dict(
    num_target_layers=LAYERS, num_layers=2, rope_theta=70_000.0, block_size=4, aux_layer_ids=(2, 4, 6), mask_token_id=5
)


def block_head(kind: str, **changes: Any) -> Any:
    """A random head of the tiny target that drafts a block."""
    method: Any = HEADS[kind].head
    kept = []
    if size := changes.get("draft_vocab_size"):
        kept.append(torch.randperm(V, generator=torch.Generator().manual_seed(0))[:size].sort().values)
    return randomised(method(method.Config(**BLOCKS | BLOCK_HEADS[kind] | changes), *kept), 0.2)


dflash, dflash2, dspark, lilicorr, xpress, domino = (partial(block_head, kind) for kind in BLOCK_HEADS)


def write(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], file: str = "model.safetensors"
) -> str:
    """A folder of two files; a pickle where the file's name says so. Settings of None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    tensors = {name: value.detach().clone().contiguous() for name, value in weights.items()}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / file)
    return str(folder)


def drafts_equal(found: Any, expected: Any, target: FrozenTarget) -> None:
    """Compare tensors, settings, and drafts with their scores."""
    assert found.config == expected.config
    ours, theirs = expected.to_checkpoint(), found.to_checkpoint()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    batch = target_batch(target, [[20], [20]], expected.aux_layer_ids)
    one, other = (head.propose(seen(head, batch, "chain:3", [9, 14]), greedy) for head in (found, expected))
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.scores, other.scores)


def comes_back(found: Any, folder: Path, target: FrozenTarget) -> None:
    """Save a head in our form, read it, and read it again as if another project had saved it."""
    save_head(found, folder / "ours", target=target_record(target))
    assert not is_published(str(folder / "ours"))
    drafts_equal(load_head(folder / "ours"), found, target)
    record = json.loads((folder / "ours/config.json").read_text())
    del record["draftsmith"]
    (folder / "ours/config.json").write_text(json.dumps(record))
    drafts_equal(read_published(str(folder / "ours"), target), found, target)


RAW: dict[str, Any] = BLOCK | dict(
    architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, hidden_act="silu",
    attention_bias=False, tie_word_embeddings=False, draft_vocab_size=48, torch_dtype="float32",
)  # fmt: skip
"""config.json of a raw head, whose rotary base and layers are Llama's and the engines' defaults."""
SPECULATORS: dict[str, Any] = dict(
    architectures=["Eagle3DraftModel"], speculators_model_type="eagle3", speculators_version="0.5.0",
    draft_vocab_size=48, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 3, 6],
    transformer_layer_config=BLOCK | dict(model_type="llama", num_hidden_layers=1, rope_parameters=LLAMA3),
    speculators_config=dict(algorithm="eagle3", verifier=dict(name_or_path="org/target")), dtype="float32",
)  # fmt: skip


def layers_0(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of a list of layers."""
    return {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}


QWEN3: dict[str, Any] = BLOCK | dict(
    model_type="qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2, hidden_act="silu", rope_theta=70_000.0,
    attention_bias=False, attention_dropout=0.0, tie_word_embeddings=False, use_sliding_window=False, dtype="float32",
)  # fmt: skip
ZLAB: dict[str, Any] = QWEN3 | dict(
    architectures=["DFlashDraftModel"], auto_map={"AutoModel": "dflash.DFlashDraftModel"}, block_size=4,
    num_target_layers=LAYERS, dflash_config=dict(mask_token_id=5, target_layer_ids=[1, 3, 5]),
)  # fmt: skip
"""config.json of a DFlash head, by z-lab and SpecForge."""
SELECTOR: dict[str, Any] = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=6, selector_top_k=12)
ZLAB2: dict[str, Any] = ZLAB | dict(
    architectures=["DFlash2DraftModel"], auto_map={"AutoModel": "dflash2.DFlash2DraftModel"}, block_size=None,
    is_causal=False, dflash_config=ZLAB["dflash_config"] | SELECTOR | dict(block_size=4),
)  # fmt: skip
"""config.json of a DFlash2 head, by z-lab and SpecForge."""
LILICORR: dict[str, Any] = ZLAB | dict(
    architectures=["LiLiCorrDraftModel"],
    dflash_config=ZLAB["dflash_config"] | dict(
        block_size=4, projector_type="lilicorr", lilicorr_enabled=True, lilicorr_candidate_topk=4,
        lilicorr_hidden_size=16, lilicorr_num_layers=2, lilicorr_num_heads=2, lilicorr_mlp_ratio=1.5,
        lilicorr_factor_dim=6, lilicorr_vector_eps=1e-4, lilicorr_logit_scale=8.0,
    ),
)  # fmt: skip
"""config.json of a LiLiCorr head, by Model Optimizer."""
XPRESS: dict[str, Any] = ZLAB | dict(
    architectures=["Qwen3XPressModel"], auto_map=None, draft_vocab_size=V, sample_from_anchor=False, xpress_rank=16,
    xpress_mlp_hidden=64, xpress_block_size=4, xpress_num_passes=6, xpress_topc=12,
)  # fmt: skip
"""config.json of an XPress head, by its authors."""
DOMINO: dict[str, Any] = ZLAB | dict(
    emb_dim=5, dflash_config=ZLAB["dflash_config"] | dict(
        projector_type="domino", pure_draft_prefix_len=1, emb_dim=5, gru_hidden_dim=6, shift_label=True,
    ),
)  # fmt: skip
"""config.json of a Domino head, by its authors. SpecForge's name another class."""
MARKOV: dict[str, Any] = dict(
    markov_rank=6, markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True
)
SPECFORGE_DSPARK: dict[str, Any] = ZLAB | dict(
    architectures=["DSparkDraftModel"], auto_map={"AutoModel": "dspark.DSparkDraftModel"},
    dflash_config=ZLAB["dflash_config"] | MARKOV
    | dict(attention_mode="gqa", projector_type="dspark", confidence_head_alpha=1.0),
)  # fmt: skip
DEEPSPEC: dict[str, Any] = QWEN3 | MARKOV | dict(
    architectures=["Qwen3DSparkModel"], block_size=4, num_target_layers=LAYERS, target_layer_ids=[1, 3, 5],
    mask_token_id=5, num_anchors=512,
)  # fmt: skip
SPECULATORS_DFLASH: dict[str, Any] = dict(
    architectures=["DFlashDraftModel"], speculators_model_type="dflash", speculators_version="0.6.0", block_size=4,
    transformer_layer_config=QWEN3, draft_vocab_size=V, aux_hidden_state_layer_ids=[2, 4, 6], mask_token_id=5,
    sample_from_anchor=False, sliding_window_non_causal=False, target_hidden_size=None, dtype="float32",
    speculators_config=dict(algorithm="dflash", verifier=dict(name_or_path="org/target")),
)  # fmt: skip
SPECULATORS_DFLASH2: dict[str, Any] = SPECULATORS_DFLASH | SELECTOR | dict(
    architectures=["DFlash2DraftModel"], speculators_model_type="dflash2", sliding_window_non_causal=True
)  # fmt: skip
SPECULATORS_XPRESS: dict[str, Any] = SPECULATORS_DFLASH | dict(
    architectures=["XPressSpeculator"], speculators_model_type="xpress", xpress_rank=16, xpress_mlp_ratio=4,
    num_jacobi_passes=6, xpress_topc=12,
)  # fmt: skip
OF_SPECULATORS = {
    "xpress_head.w1.weight": "refiner_head.token_embed.weight",
    "xpress_head.w2.weight": "refiner_head.readout.weight",
    "xpress_head.mix.L": "refiner_head.mix_l",
    **{f"xpress_head.mlp.{n}_proj.weight": f"refiner_head.mlp_{n}.weight" for n in ("gate", "up", "down")},
    **{f"xpress_head.{n}.weight": f"refiner_head.{n}.weight" for n in ("down_h", "down_g", "in_proj")},
}
"""Our names of tensors -> speculators'."""
SPECULATORS_DSPARK: dict[str, Any] = SPECULATORS_DFLASH | MARKOV | dict(
    architectures=["DSparkDraftModel"], speculators_model_type="dspark", sample_from_anchor=True
)  # fmt: skip
