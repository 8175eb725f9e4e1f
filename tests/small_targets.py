"""Small random targets of several families, with untrained heads and requests for them."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.runtime.engine import Engine, EngineOptions, Output, Request
from eval.runtime.sampling import Sampling
from heads.base import Drafter
from heads.registry import build_head, build_untrained
from heads.target.model import FrozenTarget
from heads.tree import ROOT_ONLY, TreeShape, parse_shape

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.1, eos_token_id=2,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": dict(head_dim=64),
    "qwen3_moe": dict(head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128),
    "deepseek_v3": dict(
        num_key_value_heads=8, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64,
        num_experts_per_tok=2, moe_intermediate_size=128,
    ),
}  # fmt: skip

HYBRID: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
DELTA: dict[str, Any] = dict(
    head_dim=16, linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
)
MAMBA2: dict[str, Any] = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=16)
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "bamba": MAMBA2 | dict(attn_layer_indices=[2]),
}
OTHER_HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": dict(layer_types=["conv", "conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    # Some of the following clamp time steps to a minimum, but only for whole texts.
    "qwen3_5_moe_text": DELTA | EXPERTS,
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


def make_target(family: str, dtype: torch.dtype, device: torch.device = CPU, **sizes: int) -> FrozenTarget:
    """Return a small random target."""
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES.get(family, {}), **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if "experts" in str(model):
        model.set_experts_implementation("eager")  # the library's grouped kernels do not take float32 everywhere
    return FrozenTarget(model.to(device), family)


def make_hybrid(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> FrozenTarget:
    """Return a random hybrid target, the same at every call."""
    config = AutoConfig.for_model(family, **HYBRID | (HYBRIDS | OTHER_HYBRIDS).get(family, {}) | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    if "experts" in str(model):
        model.set_experts_implementation("eager")
    return FrozenTarget(model, family)


def make_head(target: FrozenTarget) -> Drafter:
    """Return an untrained EAGLE-3 head. It uses the target's output head, so some of its draft tokens are accepted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = build_head(
            "eagle3", {"aux_layer_ids": [1, 2, 3]}, target, torch.ones(target.vocab_size, dtype=torch.int64)
        )
    drafter: Drafter = head.to(target.device, target.dtype)
    return drafter


DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"aux_layer_ids": [0, 1, 2], "depth": 3},
    "medusa": {"depth": 3},
    "mtp": {"depth": 3},
    "draft": {"layers": [0, 1]},
}


def make_drafter(name: str, target: FrozenTarget, **settings: Any) -> Any:
    """Return a random head of the kind `name`, with `settings` or those of DRAFTERS. A name such as `lookup:3` gives a
    drafter without training, and `none` gives None."""
    if name == "none":
        return None
    if ":" in name:
        return build_untrained(name, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        counts = torch.ones(target.vocab_size, dtype=torch.int64)
        return build_head(name, settings or DRAFTERS[name], target, counts).to(target.dtype)


def some_requests(vocab: int, count: int = 6, new_tokens: int = 48) -> list[Request]:
    """Return greedy, sampled and filtered requests of several lengths."""
    ways = [Sampling(), Sampling(0.8, seed=3), Sampling(0.9, top_k=20, top_p=0.9, seed=4)]
    return [
        Request([3 + (11 * i + 7 * j) % (vocab - 3) for j in range(5 + 40 * i)], new_tokens, ways[i % 3], (), True)
        for i in range(count)
    ]


def texts(outputs: list[Output]) -> list[list[int]]:
    """Return the tokens of the outputs."""
    return [output.tokens for output in outputs]


def open_engine(
    target: FrozenTarget, head: Any, shape: str | TreeShape = ROOT_ONLY, *, tokenizer: Any = None, **options: Any
) -> Engine:
    """Return an engine with a tree, which may be given by name, and other options."""
    made = parse_shape(shape) if isinstance(shape, str) else shape
    return Engine(target, head, EngineOptions(shape=made, **options), tokenizer=tokenizer)
