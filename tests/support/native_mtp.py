"""Small random targets on disk whose checkpoints contain multi-token prediction modules, with their families' names.

The names are written out here as in the published checkpoints. The code under test does not generate them.
"""

import json
import re
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
    moe_intermediate_size=16, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16,
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
ATTENTION = {"layer_types": ["full_attention"] * 4}
"""Attention layers only, in place of Qwen's recurrent layers."""
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": ("qwen2", MIMO),
    "deepseek": ("deepseek_v3", DEEPSEEK),
    "glm": ("glm4_moe", GLM),
    "glm_flash": ("glm4_moe_lite", {k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"}),
    "qwen": ("qwen3_next", QWEN | ATTENTION),
    "qwen_fused": ("qwen3_5_moe_text", QWEN | ATTENTION),
    "qwen_dense": ("qwen3_5_text", QWEN | ATTENTION),
    "hybrid": ("qwen3_next", QWEN),
    "hybrid_fused": ("qwen3_5_moe_text", QWEN),
}


Shapes = dict[str, tuple[int, ...]]


def norms(prefix: str, *names: str) -> Shapes:
    return {f"{prefix}.{name}.weight": (D,) for name in names}


def mlp(prefix: str, width: int) -> Shapes:
    shapes = {"gate_proj": (width, D), "up_proj": (width, D), "down_proj": (D, width)}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def mimo_shapes(i: int) -> Shapes:
    p = f"model.mtp_layers.{i}"
    widths = {"q": D, "k": 16, "v": 16}
    return {
        **norms(p, "token_layernorm", "hidden_layernorm", "final_layernorm"),
        f"{p}.input_proj.weight": (D, 2 * D),
        **norms(p, "input_layernorm", "post_attention_layernorm"),
        **{f"{p}.self_attn.{name}_proj.weight": (width, D) for name, width in widths.items()},
        **{f"{p}.self_attn.{name}_proj.bias": (width,) for name, width in widths.items()},
        f"{p}.self_attn.o_proj.weight": (D, D),
        **mlp(f"{p}.mlp", 48),
    }


def deepseek_shapes(i: int) -> Shapes:
    p = f"model.layers.{3 + i}"
    shapes: Shapes = {
        **norms(p, "enorm", "hnorm", "shared_head.norm"),
        f"{p}.eh_proj.weight": (D, 2 * D),
        **norms(p, "input_layernorm", "post_attention_layernorm"),
        f"{p}.self_attn.q_a_proj.weight": (24, D),
        f"{p}.self_attn.q_a_layernorm.weight": (24,),
        f"{p}.self_attn.q_b_proj.weight": (4 * 24, 24),
        f"{p}.self_attn.kv_a_proj_with_mqa.weight": (16 + 8, D),
        f"{p}.self_attn.kv_a_layernorm.weight": (16,),
        f"{p}.self_attn.kv_b_proj.weight": (4 * (16 + 12), 16),
        f"{p}.self_attn.o_proj.weight": (D, 4 * 12),
        f"{p}.mlp.gate.weight": (4, D),
        f"{p}.mlp.gate.e_score_correction_bias": (4,),
        **mlp(f"{p}.mlp.shared_experts", 16),
    }
    for e in range(4):
        shapes |= mlp(f"{p}.mlp.experts.{e}", 16)
    return shapes


def glm_shapes(i: int) -> Shapes:
    """Return the shapes of GLM-4.5, which has DeepSeek's names around its own attention."""
    p = f"model.layers.{3 + i}.self_attn"
    widths = {"q": 4 * 16, "k": 2 * 16, "v": 2 * 16}
    return {
        **{name: shape for name, shape in deepseek_shapes(i).items() if ".self_attn." not in name},
        **{f"{p}.{name}_proj.weight": (width, D) for name, width in widths.items()},
        **{f"{p}.{name}_proj.bias": (width,) for name, width in widths.items()},
        f"{p}.o_proj.weight": (D, 4 * 16),
        f"{p}.q_norm.weight": (16,),
        f"{p}.k_norm.weight": (16,),
    }


def qwen_dense_shapes(i: int) -> Shapes:
    assert i == 0
    p = "mtp.layers.0"
    return {
        "mtp.fc.weight": (D, 2 * D),
        **norms("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        **norms(p, "input_layernorm", "post_attention_layernorm"),
        f"{p}.self_attn.q_proj.weight": (2 * 4 * 16, D),
        f"{p}.self_attn.k_proj.weight": (2 * 16, D),
        f"{p}.self_attn.v_proj.weight": (2 * 16, D),
        f"{p}.self_attn.o_proj.weight": (D, 4 * 16),
        f"{p}.self_attn.q_norm.weight": (16,),
        f"{p}.self_attn.k_norm.weight": (16,),
        **mlp(f"{p}.mlp", 48),
    }


def qwen_shapes(i: int) -> Shapes:
    """Return the shapes of Qwen3-Next and of Qwen3.5's mixtures of experts."""
    p = "mtp.layers.0.mlp"
    shapes = {name: shape for name, shape in qwen_dense_shapes(i).items() if ".mlp." not in name}
    shapes |= {f"{p}.gate.weight": (4, D), f"{p}.shared_expert_gate.weight": (1, D)}
    shapes |= mlp(f"{p}.shared_expert", 16)
    for e in range(4):
        shapes |= mlp(f"{p}.experts.{e}", 16)
    return shapes


def qwen_fused_shapes(i: int) -> Shapes:
    """Return the shapes of Qwen3.6's mixtures of experts, with one tensor for all experts."""
    shapes = {name: shape for name, shape in qwen_shapes(i).items() if ".experts." not in name}
    p = "mtp.layers.0.mlp.experts"
    return shapes | {f"{p}.gate_up_proj": (4, 2 * 16, D), f"{p}.down_proj": (4, D, 16)}


SHAPES = {
    "mimo": mimo_shapes,
    "deepseek": deepseek_shapes,
    "glm": glm_shapes,
    "glm_flash": deepseek_shapes,
    "qwen": qwen_shapes,
    "qwen_fused": qwen_fused_shapes,
    "qwen_dense": qwen_dense_shapes,
    "hybrid": qwen_shapes,
    "hybrid_fused": qwen_fused_shapes,
}


def write_native(
    folder: Path, family: str, *, modules: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Write a target of `family` with its modules to `folder`, and return the modules' own tensors. They are stored in
    `dtype`, with values that bfloat16 can represent; a router's score correction is in float32."""
    model_type, size = TARGETS[family]
    config = AutoConfig.for_model(model_type, **COMMON, **size, num_nextn_predict_layers=modules)
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
        native: dict[str, Tensor] = {}
        for i in range(modules):
            for name, shape in SHAPES[family](i).items():
                value = torch.randn(shape) * 0.2 + (1.0 if "norm" in name and "qwen" not in family else 0.0)
                native[name] = value.bfloat16().to(torch.float32 if name.endswith("correction_bias") else dtype)
    weights = load_file(folder / "model.safetensors")
    shared = {}
    if family in ("deepseek", "glm"):  # stored a second time, as in the published checkpoint
        for i in range(modules):
            shared[f"model.layers.{3 + i}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
            shared[f"model.layers.{3 + i}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | native | shared, folder / "model.safetensors", metadata={"format": "pt"})
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
