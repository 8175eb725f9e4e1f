"""Small random targets on disk whose checkpoints contain multi-token prediction modules, with their families' names.

The names are written out here as in the published checkpoints. The code under test does not generate them.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

D, V = 32, 128
COMMON = dict(
    vocab_size=V, hidden_size=D, intermediate_size=48, num_attention_heads=4, max_position_embeddings=512,
    initializer_range=0.2, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
)  # fmt: skip
MIMO = dict(num_hidden_layers=3, num_key_value_heads=2)
DEEPSEEK = dict(
    num_hidden_layers=3, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    moe_intermediate_size=16, n_group=2, topk_group=1, q_lora_rank=24, kv_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
)  # fmt: skip
GLM = dict(
    num_hidden_layers=3, num_key_value_heads=2, head_dim=16, n_routed_experts=4, n_shared_experts=1,
    num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, attention_bias=True, use_qk_norm=True,
)  # fmt: skip
QWEN = dict(
    num_hidden_layers=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_value_heads=2, linear_num_key_heads=2,
    linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
Shapes = dict[str, tuple[int, ...]]


def weights(prefix: str, **shapes: tuple[int, ...]) -> Shapes:
    """Return shapes of weights. Two underscores in a name mean a dot."""
    return {f"{prefix}.{name.replace('__', '.')}.weight": shape for name, shape in shapes.items()}


def norms(prefix: str, *names: str) -> Shapes:
    return {f"{prefix}.{name}.weight": (D,) for name in names}


def biased(prefix: str, **widths: int) -> Shapes:
    return weights(prefix, **{n: (w, D) for n, w in widths.items()}) | {
        f"{prefix}.{n}.bias": (widths[n],) for n in widths
    }


def mlp(prefix: str, width: int) -> Shapes:
    return weights(prefix, gate_proj=(width, D), up_proj=(width, D), down_proj=(D, width))


def experts(prefix: str) -> Shapes:
    return {name: shape for e in range(4) for name, shape in mlp(f"{prefix}.experts.{e}", 16).items()}


def mimo_shapes(i: int) -> Shapes:
    p = f"model.mtp_layers.{i}"
    return {
        **norms(p, "token_layernorm", "hidden_layernorm", "final_layernorm"),
        **norms(p, "input_layernorm", "post_attention_layernorm"),
        **weights(p, input_proj=(D, 2 * D), self_attn__o_proj=(D, D)),
        **biased(f"{p}.self_attn", q_proj=D, k_proj=16, v_proj=16),
        **mlp(f"{p}.mlp", 48),
    }


def around_attention(i: int) -> Shapes:
    """Return the shapes that DeepSeek's family and GLM-4.5 have in common."""
    p = f"model.layers.{3 + i}"
    return {
        **norms(p, "enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"),
        **weights(p, eh_proj=(D, 2 * D), mlp__gate=(4, D)),
        f"{p}.mlp.gate.e_score_correction_bias": (4,),
        **mlp(f"{p}.mlp.shared_experts", 16),
        **experts(f"{p}.mlp"),
    }


def deepseek_shapes(i: int) -> Shapes:
    return around_attention(i) | weights(
        f"model.layers.{3 + i}.self_attn",
        **dict(q_a_proj=(24, D), q_a_layernorm=(24,), q_b_proj=(4 * 24, 24)),
        **dict(kv_a_proj_with_mqa=(16 + 8, D), kv_a_layernorm=(16,), kv_b_proj=(4 * (16 + 12), 16)),
        o_proj=(D, 4 * 12),
    )


def glm_shapes(i: int) -> Shapes:
    p = f"model.layers.{3 + i}.self_attn"
    attention = biased(p, q_proj=4 * 16, k_proj=2 * 16, v_proj=2 * 16)
    return around_attention(i) | attention | weights(p, o_proj=(D, 4 * 16), q_norm=(16,), k_norm=(16,))


def around_mlp(i: int) -> Shapes:
    """Return the shapes that all of Qwen's modules have."""
    assert i == 0
    p = "mtp.layers.0"
    return {
        **norms("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        **norms(p, "input_layernorm", "post_attention_layernorm"),
        **weights("mtp", fc=(D, 2 * D)),
        **weights(f"{p}.self_attn", q_proj=(2 * 4 * 16, D), k_proj=(2 * 16, D), v_proj=(2 * 16, D), o_proj=(D, 4 * 16)),
        **weights(f"{p}.self_attn", q_norm=(16,), k_norm=(16,)),
    }


def qwen_dense_shapes(i: int) -> Shapes:
    return around_mlp(i) | mlp("mtp.layers.0.mlp", 48)


def around_experts(i: int) -> Shapes:
    p = "mtp.layers.0.mlp"
    return around_mlp(i) | weights(p, gate=(4, D), shared_expert_gate=(1, D)) | mlp(f"{p}.shared_expert", 16)


def qwen_shapes(i: int) -> Shapes:
    """Return the shapes of Qwen3-Next and of Qwen3.5's mixtures of experts."""
    return around_experts(i) | experts("mtp.layers.0.mlp")


def qwen_fused_shapes(i: int) -> Shapes:
    """Return the shapes of Qwen3.6's mixtures of experts, with one tensor for all experts."""
    p = "mtp.layers.0.mlp.experts"
    return around_experts(i) | {f"{p}.gate_up_proj": (4, 2 * 16, D), f"{p}.down_proj": (4, D, 16)}


ATTENTION = QWEN | {"layer_types": ["full_attention"] * 4}
"""Attention layers only, in place of Qwen's recurrent layers."""
TARGETS: dict[str, tuple[str, dict[str, Any], Callable[[int], Shapes]]] = {
    "mimo": ("qwen2", MIMO, mimo_shapes),
    "deepseek": ("deepseek_v3", DEEPSEEK | dict(first_k_dense_replace=1), deepseek_shapes),
    "glm": ("glm4_moe", GLM, glm_shapes),
    "glm_flash": ("glm4_moe_lite", DEEPSEEK, deepseek_shapes),
    "qwen": ("qwen3_next", ATTENTION, qwen_shapes),
    "qwen_fused": ("qwen3_5_moe_text", ATTENTION, qwen_fused_shapes),
    "qwen_dense": ("qwen3_5_text", ATTENTION, qwen_dense_shapes),
    "hybrid": ("qwen3_next", QWEN, qwen_shapes),
    "hybrid_fused": ("qwen3_5_moe_text", QWEN, qwen_fused_shapes),
}


def write_native(
    folder: Path, family: str, *, modules: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Write a target of `family` with its modules to `folder`, and return the modules' own tensors. They are stored in
    `dtype`, with values that bfloat16 can represent; a router's score correction is in float32."""
    model_type, size, shapes = TARGETS[family]
    config = AutoConfig.for_model(model_type, **COMMON, **size, num_nextn_predict_layers=modules)
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
        native: dict[str, Tensor] = {}
        for i in range(modules):
            for name, shape in shapes(i).items():
                value = torch.randn(shape) * 0.2 + (1.0 if "norm" in name and "qwen" not in family else 0.0)
                native[name] = value.bfloat16().to(torch.float32 if name.endswith("correction_bias") else dtype)
    stored = load_file(folder / "model.safetensors")
    shared = {}
    if family in ("deepseek", "glm"):  # stored a second time, as in the published checkpoint
        for i in range(modules):
            shared[f"model.layers.{3 + i}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
            shared[f"model.layers.{3 + i}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored | native | shared, folder / "model.safetensors", metadata={"format": "pt"})
    if family == "mimo":
        change_config(folder, model_type="mimo", architectures=["MiMoForCausalLM"])
    return native


def make_multimodal(folder: Path) -> None:
    """Turn a Qwen3.5 checkpoint into that of a multimodal model, like the published ones."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"].removesuffix("_text")
    (name,) = config["architectures"]
    whole = AutoConfig.for_model(family, text_config=config, vision_config={"depth": 1}).to_dict()
    whole |= {"architectures": [name.replace("ForCausalLM", "ForConditionalGeneration")]}
    (folder / "config.json").write_text(json.dumps(whole))
    weights = load_file(folder / "model.safetensors")
    named = {re.sub(r"^model\.", "model.language_model.", name): value for name, value in weights.items()}
    named["model.visual.patch_embed.weight"] = torch.zeros(2, 3)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path) -> None:
    """Split the checkpoint's file into three shards with an index. The modules are in more than one shard."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{n}-of-00003.safetensors" for n in ("00001", "00002", "00003")]
    lies = {
        key: names[0 if not key.startswith("mtp") and n % 4 else 1 + n % 2] for n, key in enumerate(sorted(weights))
    }
    for name in names:
        own = {key: value for key, value in weights.items() if lies[key] == name}
        save_file(own, folder / name, metadata={"format": "pt", "of": name})
    sizes = {"total_size": sum(value.nbytes for value in weights.values())}
    sizes["total_parameters"] = sum(value.numel() for value in weights.values())
    index = {"metadata": sizes, "weight_map": lies}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change_weights(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of the checkpoint, or remove those given as None. Two underscores in a name mean a dot."""
    weights = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        weights.pop(name.replace("__", "."), None)
        if value is not None:
            weights[name.replace("__", ".")] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
