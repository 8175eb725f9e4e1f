"""Small random targets of every family that the tests use, with untrained heads for them."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, T5ForConditionalGeneration

from eval.runtime.engine import Engine, EngineOptions, Output
from heads.blocks.block_heads import BLOCK_HEADS
from heads.core.contract import split_draft
from heads.core.tree import ROOT_ONLY, TreeShape, parse_shape
from heads.methods.two_drafts import LookupFirst
from heads.registry import build_head, build_untrained
from heads.targets.frozen_target import FrozenTarget

CPU = torch.device("cpu")
VOCAB = 61
BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.3,  # wide, so that greedy text wanders
)  # fmt: skip
WINDOW: dict[str, Any] = dict(head_dim=16, sliding_window=8)
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=16)
LATENT: dict[str, Any] = dict(q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": dict(head_dim=16),
    "mistral": dict(sliding_window=8),
    "phi3": {},
    "gemma2": WINDOW | dict(query_pre_attn_scalar=16, attn_implementation="eager"),
    "gemma3_text": WINDOW | dict(query_pre_attn_scalar=16, num_hidden_layers=6),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": dict(head_dim=16, num_experts=6, decoder_sparse_step=1, **EXPERTS),
    "deepseek_v3": dict(
        num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1,
        **EXPERTS, **LATENT,
    ),
    "deepseek_v2": dict(
        num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
        topk_method="greedy", **EXPERTS, **LATENT,
    ),
    "gpt_neox": {},
    "gpt_bigcode": dict(multi_query=True),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "olmo2": {},
    "granite": dict(logits_scaling=2.0, embedding_multiplier=2.0),
    "cohere2": WINDOW,
    "gpt_oss": WINDOW | dict(num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager"),
    "glm4": dict(head_dim=16),
    "starcoder2": dict(sliding_window=None),
    "smollm3": {},
    "gpt2": dict(eos_token_id=1),
    "falcon": dict(multi_query=True, new_decoder_architecture=False, alibi=False),
}  # fmt: skip
T5: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, decoder_start_token_id=0,
    # Few near distances of their own, and far ones that share: positions that are off by one show.
    relative_attention_num_buckets=8, relative_attention_max_distance=20,
)  # fmt: skip
DELTA: dict[str, Any] = dict(
    head_dim=16, linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
SHARED_EXPERTS = EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=16)
MAMBA2: dict[str, Any] = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=16)
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | SHARED_EXPERTS,
    "qwen3_5_text": DELTA,
    "bamba": MAMBA2 | dict(attn_layer_indices=[2]),
}
OTHER_HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": dict(layer_types=["conv", "conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    # Some of the following clamp time steps to a minimum, but only for whole texts.
    "qwen3_5_moe_text": DELTA | SHARED_EXPERTS,
    "falcon_h1": MAMBA2 | dict(mamba_d_ssm=64),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"], mamba_num_heads=8,
        mamba_head_dim=8, ssm_state_size=16, n_groups=2, chunk_size=16, head_dim=8, time_step_min=1e-9,
    ),
    "granitemoehybrid": MAMBA2 | dict(
        layer_types=DELTA["layer_types"], num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32
    ),
    "olmo_hybrid": DELTA | dict(linear_num_key_heads=4),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "linear_attention"], num_mem_blocks=1,
        mamba_d_state=16, mamba_headdim=8, mamba_ngroups=2, chunk_size=16, use_mem_rope=True, time_step_min=1e-9,
    ),
}  # fmt: skip
SMALL_HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"aux_layer_ids": [0, 1, 2], "depth": 3},
    "mtp": {"depth": 3},
    "medusa": {"depth": 3},
    "dflash": {},
    "dflash2": {"selector_rank": 8},
    "dspark": {"markov_rank": 8},
    "lilicorr": {"lilicorr_hidden_size": 16, "lilicorr_num_heads": 2, "lilicorr_factor_dim": 8},
    "xpress": {"xpress_rank": 16, "xpress_mlp_hidden": 64, "xpress_topc": 16},
    "domino": {"gru_hidden_dim": 8, "emb_dim": 8},
    "draft": {"layers": [0, 1]},
}
"""What keeps a head of each kind small."""


def small_heads(block: dict[str, Any], **others: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings of a small head of each kind. `block`: further ones of those that draft a block. `others`: of
    other kinds."""
    more = dict.fromkeys(BLOCK_HEADS, block) | others
    return {kind: small | more.get(kind, {}) for kind, small in SMALL_HEADS.items()}


def make_target(family: str, dtype: torch.dtype, device: torch.device = CPU, **changes: Any) -> FrozenTarget:
    """Return a random target of a family, the same at every call."""
    if family in HYBRIDS | OTHER_HYBRIDS:
        return make_hybrid(family, dtype, **changes)
    config: Any = AutoConfig.for_model(family, **(T5 if family == "t5" else BASE | FAMILIES.get(family, {})) | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if family == "t5":
            made: Any = T5ForConditionalGeneration(config)
            model: Any = with_wide_weights(made.to(dtype), 0.35)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return FrozenTarget(with_plain_experts(model).to(device), family)


def make_hybrid(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> FrozenTarget:
    """Return a random target with recurrent layers, the same at every call."""
    own = (HYBRIDS | OTHER_HYBRIDS).get(family, {})
    config: Any = AutoConfig.for_model(
        family, **BASE | dict(num_hidden_layers=4, initializer_range=0.02) | own | changes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = with_wide_weights(AutoModelForCausalLM.from_config(config, dtype=dtype), 0.3)
    return FrozenTarget(with_plain_experts(model), family)


def with_wide_weights(model: Any, std: float) -> Any:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model


def with_plain_experts(model: Any) -> Any:
    if "experts" in str(model):
        model.set_experts_implementation("eager")  # the library's grouped kernels take few number types
    return model


def make_drafter(name: str, target: FrozenTarget, **settings: Any) -> Any:
    """Return a random head of the kind `name`, with `settings` or those of SMALL_HEADS. A name such as `lookup:3` gives
    a drafter without training, `lookup:3+eagle3` both in one, and `none` gives None."""
    if name == "none":
        return None
    match, name = split_draft(name)
    if match is not None:
        return LookupFirst(match, make_drafter(name, target, **settings))
    if ":" in name:
        return build_untrained(name, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        counts = torch.ones(target.vocab_size, dtype=torch.int64)
        return build_head(name, settings or SMALL_HEADS[name], target, counts).to(target.dtype)


def texts(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


def open_engine(
    target: FrozenTarget, head: Any, shape: str | TreeShape = ROOT_ONLY, *, tokenizer: Any = None, **options: Any
) -> Engine:
    """Return an engine with a tree, which may be given by name, and other options."""
    made = parse_shape(shape) if isinstance(shape, str) else shape
    return Engine(target, head, EngineOptions(shape=made, **options), tokenizer=tokenizer)
