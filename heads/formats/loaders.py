"""What engines, and the papers' own repositories, load: classes, tensors, fields and layer ids, as data.

Read in the source of the versions named here. None of them can be trusted to notice what does not fit: SGLang skips
tensors whose names it does not know, vLLM leaves absent ones as they are in memory, the EAGLE repository does both.
Shapes are functions of config.json, so that a folder can be compared without loading it (`heads.formats.contract`).

Letters: D hidden, V vocabulary, Vd draft vocabulary.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"
ENGINES = (VLLM, SGLANG)
EAGLE, MEDUSA, OLD_VLLM = "the EAGLE repository (cb7e084)", "the Medusa repository (11af0aa)", "vLLM 0.32.0"

Shapes = dict[str, tuple[int, ...]]

Command = Callable[[str, str, int], str]
"""The target with its options, the head, and the tokens drafted a round -> what serves them."""


def vllm(method: str) -> Command:
    """Of vLLM."""

    def run(target: str, head: str, steps: int) -> str:
        settings = json.dumps({"method": method, "model": head, "num_speculative_tokens": steps})
        return f"vllm serve {target} --speculative-config {shlex.quote(settings)}"

    return run


def sglang(algorithm: str) -> Command:
    """Of SGLang: chains, as vLLM drafts them."""

    def run(target: str, head: str, steps: int) -> str:
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
            f"--speculative-draft-model-path {shlex.quote(head)} --speculative-num-steps {steps} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}"
        )

    return run


COMMANDS: dict[str, dict[str, Command]] = {
    "eagle3": {
        VLLM: vllm("eagle3"),
        SGLANG: sglang("EAGLE3"),
        EAGLE: lambda target, head, _: f"EaModel.from_pretrained(base_model_path={target!r}, ea_model_path={head!r})",
    },
    "mtp": {VLLM: vllm("mtp"), SGLANG: sglang("NEXTN")},
    "draft": {VLLM: vllm("draft_model"), SGLANG: sglang("STANDALONE")},
    "medusa": {OLD_VLLM: vllm("medusa"), MEDUSA: lambda _, head, __: f"MedusaModel.from_pretrained({head!r})"},
}
"""kind of head -> who reads it -> the command. vLLM removed Medusa in 0.33, and SGLang never had it."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Loader:
    """How one reader loads an EAGLE-3 head."""

    targets: frozenset[str]
    """Classes of targets whose residual streams it hands to a head."""
    ids: tuple[str, ...] = ()
    """The path of the layer ids in config.json; empty: it reads none, and knows the default layers alone."""
    offset: int = 0
    """The stream that enters layer k is number k + offset."""
    last: bool = False
    """Whether it captures what the last layer puts out."""
    fewest: int = 1
    """The fewest layers that it fuses."""
    options: frozenset[str] = frozenset()
    """Settings of a head that it reads; it ignores the others."""


HOOKS_OF_BOTH = """
Apertus DeepseekV2 DeepseekV3 Gemma4 GptOss InternLM3 Llama Llama4 MiniMaxM2 Ministral3 Mistral MistralLarge3 Phi3 Qwen2
Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe
"""
HOOKS_OF_VLLM = """
Afmoe Cohere2Moe Deepseek Ernie4_5 Granite GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA Laguna MiMo MiMoV2
MiMoV2Flash MiniCPM MiniCPM3 NemotronH Plamo3 Step1
"""
HOOKS_OF_SGLANG = """
BailingMoe BailingMoeV2 DeepseekV32 ExaoneMoe Gemma3 Glm4Moe Glm4MoeLite GlmMoeDsa LongcatFlash Mellum Qwen2Moe
"""
MULTIMODAL = {
    VLLM: "Gemma4 Gemma4Unified Llama4 Llava Mistral3 Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe KimiK25",
    SGLANG: "Gemma3 Gemma4 Gemma4Unified Llama4 Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe KimiK25",
}


def hooked(reader: str, *texts: str) -> frozenset[str]:
    """The classes that some families' names stand for; of those with the hook only the ones that transformers has."""
    text = {f"{name}ForCausalLM" for names in texts for name in names.split()}
    return frozenset(text | {f"{name}ForConditionalGeneration" for name in MULTIMODAL.get(reader, "").split()})


EAGLE_3_1 = frozenset({"fc_norm", "norm_output"})
EAGLE3 = {
    VLLM: Eagle3Loader(
        targets=hooked(VLLM, HOOKS_OF_BOTH, HOOKS_OF_VLLM),
        ids=("eagle_aux_hidden_state_layer_ids",),
        last=True,
        options=EAGLE_3_1,
    ),
    SGLANG: Eagle3Loader(
        targets=hooked(SGLANG, HOOKS_OF_BOTH, HOOKS_OF_SGLANG),
        ids=("eagle_config", "eagle_aux_hidden_state_layer_ids"),
        offset=-1,
        fewest=2,  # it leaves `fc` out where what comes is as wide as what goes
        options=EAGLE_3_1,
    ),
    EAGLE: Eagle3Loader(targets=hooked(EAGLE, "Llama Qwen3")),
}
EAGLE3_FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,  # the engines norm the inputs of further layers differently
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_residual": False,  # SGLang knows no other
}
EAGLE3_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("draft_vocab_size", "num_aux_hidden_states"),
)


def eagle3_tensors(c: Mapping[str, Any]) -> Shapes:
    """The tensors of a head with this config.json; embedding table and the rest are the target's."""
    D, V, Vd, L = c["hidden_size"], c["vocab_size"], c["draft_vocab_size"], c["num_aux_hidden_states"]
    queries, keys = (c[name] * c["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: Shapes = {
        "fc.weight": (D, L * D),
        **{f"midlayer.{name}.weight": (D,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "midlayer.self_attn.q_proj.weight": (queries, 2 * D),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * D),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * D),
        "midlayer.self_attn.o_proj.weight": (D, queries),
        **gated_mlp("midlayer.mlp", D, c["intermediate_size"]),
        "norm.weight": (D,),
        "lm_head.weight": (Vd, D),
    }
    if c.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (D,) for i in range(L)}
    if Vd != V:  # vLLM refuses the tables of a whole vocabulary
        shapes |= {"d2t": (Vd,), "t2d": (V,)}
    return shapes


@dataclass(frozen=True)
class MtpLoader:
    """How engines load the modules of one class of targets."""

    layout: str
    """One of heads.formats.mtp.LAYOUTS."""
    block: Callable[[Any], Shapes]
    """The target's config -> the tensors of a module's decoder block."""
    count: str
    """The field of the target's config with the number of modules."""
    most: Mapping[str, int | None]
    """engine -> the most modules that it loads, None for any number; engines that are not here have no class for it."""


def gated_mlp(prefix: str, D: int, width: int) -> Shapes:
    """A gated MLP, an expert's too."""
    return {
        f"{prefix}.gate_proj.weight": (width, D),
        f"{prefix}.up_proj.weight": (width, D),
        f"{prefix}.down_proj.weight": (D, width),
    }


def block_norms(D: int) -> Shapes:
    """The two norms of a decoder block."""
    return {f"{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}


def qwen2_block(c: Any) -> Shapes:
    """Of MiMo: queries, keys and values with biases."""
    D, d = c.hidden_size, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    queries, keys = c.num_attention_heads * d, c.num_key_value_heads * d
    shapes = block_norms(D) | gated_mlp("mlp", D, c.intermediate_size)
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        shapes |= {f"self_attn.{name}_proj.weight": (width, D), f"self_attn.{name}_proj.bias": (width,)}
    return shapes | {"self_attn.o_proj.weight": (D, queries)}


def deepseek_block(c: Any) -> Shapes:
    """Of DeepSeek-V3: latent attention and experts."""
    D, H, latent, rope = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
    queries = H * (c.qk_nope_head_dim + rope)
    shapes = block_norms(D) | {
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, D),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (H * (c.qk_nope_head_dim + c.v_head_dim), latent),
        "self_attn.o_proj.weight": (D, H * c.v_head_dim),
        "mlp.gate.weight": (c.n_routed_experts, D),
        "mlp.gate.e_score_correction_bias": (c.n_routed_experts,),
        **gated_mlp("mlp.shared_experts", D, c.n_shared_experts * c.moe_intermediate_size),
    }
    if c.q_lora_rank is None:
        shapes["self_attn.q_proj.weight"] = (queries, D)
    else:
        shapes["self_attn.q_a_proj.weight"] = (c.q_lora_rank, D)
        shapes["self_attn.q_a_layernorm.weight"] = (c.q_lora_rank,)
        shapes["self_attn.q_b_proj.weight"] = (queries, c.q_lora_rank)
    return shapes | experts(D, c.moe_intermediate_size, c.n_routed_experts)


def qwen3_next_block(c: Any) -> Shapes:
    """Of Qwen3-Next and of Qwen3.5's mixtures of experts: gated attention with norms, and experts."""
    D = c.hidden_size
    return {
        **gated_attention(c),
        "mlp.gate.weight": (c.num_experts, D),
        "mlp.shared_expert_gate.weight": (1, D),
        **gated_mlp("mlp.shared_expert", D, c.shared_expert_intermediate_size),
        **experts(D, c.moe_intermediate_size, c.num_experts),
    }


def qwen3_5_block(c: Any) -> Shapes:
    """Of Qwen3.5's dense models."""
    return gated_attention(c) | gated_mlp("mlp", c.hidden_size, c.intermediate_size)


def gated_attention(c: Any) -> Shapes:
    """Attention whose queries come with a gate, and the norms of its block."""
    D, d = c.hidden_size, c.head_dim
    queries, keys = c.num_attention_heads * d, c.num_key_value_heads * d
    return block_norms(D) | {
        "self_attn.q_proj.weight": (2 * queries, D),
        "self_attn.k_proj.weight": (keys, D),
        "self_attn.v_proj.weight": (keys, D),
        "self_attn.o_proj.weight": (D, queries),
        "self_attn.q_norm.weight": (d,),
        "self_attn.k_norm.weight": (d,),
    }


def experts(D: int, width: int, count: int) -> Shapes:
    """Each expert under a number of its own."""
    return {name: shape for e in range(count) for name, shape in gated_mlp(f"mlp.experts.{e}", D, width).items()}


ONE_EACH = {VLLM: 1, SGLANG: 1}
MTP = {
    "DeepseekV3ForCausalLM": MtpLoader("deepseek", deepseek_block, "num_nextn_predict_layers", {VLLM: None, SGLANG: 1}),
    "MiMoForCausalLM": MtpLoader("mimo", qwen2_block, "num_nextn_predict_layers", ONE_EACH),
    "Qwen3NextForCausalLM": MtpLoader("qwen", qwen3_next_block, "num_nextn_predict_layers", ONE_EACH),
    "Qwen3_5ForCausalLM": MtpLoader("qwen", qwen3_5_block, "mtp_num_hidden_layers", ONE_EACH),
    "Qwen3_5MoeForCausalLM": MtpLoader("qwen", qwen3_next_block, "mtp_num_hidden_layers", ONE_EACH),
}
"""Class of target -> how its modules are loaded. The folder's config.json is the target's own: engines go by its class,
and take embedding table and output head from the target where the folder has none. None reads a draft vocabulary."""

MEDUSA_TARGETS = frozenset({"LlamaForCausalLM"})
"""What the Medusa repository runs. It unpickles medusa_lm_head.pt, which holds the same tensors."""
MEDUSA_FIELDS: dict[str, Any] = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True}
MEDUSA_SIZES = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")


def medusa_tensors(c: Mapping[str, Any]) -> Shapes:
    """The heads of a Medusa with this config.json, over the target's whole vocabulary."""
    D, V, blocks = c["hidden_size"], c["vocab_size"], c["medusa_num_layers"]
    shapes: Shapes = {}
    for k in range(c["medusa_num_heads"]):
        for j in range(blocks):
            shapes |= {f"{k}.{j}.linear.weight": (D, D), f"{k}.{j}.linear.bias": (D,)}
        shapes[f"{k}.{blocks}.weight"] = (V, D)
    return shapes
