"""Classes of targets whose residual streams vLLM 0.33.0, SGLang 0.5.23, llama.cpp and OpenVINO hand to heads.

Of the classes that an engine supports, these are only the ones that transformers has.
"""

TEXT = {
    "vllm sglang sglang-blocks": """
        DeepseekV2 DeepseekV3 Gemma4 GptOss InternLM3 Llama Ministral3 Mistral MistralLarge3 Phi3 Qwen3 Qwen3Moe
        Qwen3Next Qwen3_5 Qwen3_5Moe""",
    "vllm sglang": "Apertus Llama4 MiniMaxM2 Qwen2",
    "vllm sglang-blocks": "Laguna MiMoV2 MiMoV2Flash NemotronH",
    "vllm": """
        Afmoe Cohere2Moe Deepseek Ernie4_5 Granite GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA MiMo MiniCPM
        MiniCPM3 Plamo3 Step1""",
    "sglang sglang-blocks": "Glm4MoeLite Mellum",
    "sglang": "BailingMoe BailingMoeV2 DeepseekV32 ExaoneMoe Gemma3 Glm4Moe GlmMoeDsa LongcatFlash Qwen2Moe",
    "sglang-blocks": "Beam Lfm2 Lfm2Moe",
}
"""Families of causal language models, by the readers that support them. vLLM supports the same ones for all heads."""
MULTIMODAL = {
    "vllm sglang sglang-blocks": "Gemma4 Gemma4Unified Kimi_K25 Qwen3VLMoe Qwen3_5 Qwen3_5Moe",
    "vllm sglang": "Llama4 Qwen2_5_VL Qwen3VL",
    "vllm": "Llava Mistral3",
    "sglang": "Gemma3",
    "sglang-blocks": "Lfm2Vl MiniCPMV4_6 MiniCPMV4_7 MiniMaxM3Sparse MuseGlimmer MuseSpark",
}
"""The same of multimodal models. Qwen3-VL's hook for block heads calls a method that its dense language model lacks."""


def supported_classes(reader: str, *others: str) -> frozenset[str]:
    """Return the classes that a reader supports: vllm, sglang (EAGLE-3 heads) or sglang-blocks."""
    names = set(others)
    for families, suffix in ((TEXT, "ForCausalLM"), (MULTIMODAL, "ForConditionalGeneration")):
        for readers, text in families.items():
            if reader in readers.split():
                names |= {name + suffix for name in text.split()}
    return frozenset(names)


VLLM_TARGETS = supported_classes("vllm")
SGLANG_TARGETS = supported_classes("sglang")
SGLANG_BLOCK_TARGETS = supported_classes("sglang-blocks", "NemotronH_Omni_Reasoning_V3")
LLAMACPP = {
    "ForCausalLM": """
        BailingMoeV3 DeepseekV4 Gemma4 GptOss HunYuanVL InternLM3 Lfm2 Lfm2Moe Llama MiMoV2 MiMoV2Flash MiniMaxM2
        Mistral Mixtral MuseGlimmer Nanbeige NemotronH Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe""",
    "ForConditionalGeneration": "Gemma4 Gemma4Unified HunYuanVL Llava MiniCPMV4_6 MuseGlimmer Qwen3_5 Qwen3_5Moe",
}
"""Families whose graphs in llama.cpp b11434 keep the input of each layer, by the classes that its converter reads."""
LLAMACPP_TARGETS = frozenset(name + suffix for suffix, names in LLAMACPP.items() for name in names.split())
OPENVINO_TARGETS = frozenset({"LlamaForCausalLM", "Qwen3ForCausalLM"})
"""Those that OpenVINO GenAI 2026.4.1 names for EAGLE-3. Only Llama was run."""
