#!/usr/bin/env bash
# transformers: whether packed texts see each other depends on use_cache, and on the family.
# Expected: two texts in one row, with positions that begin again (DataCollatorWithFlattening) and no attention mask, are kept apart: create_causal_mask
#   finds them by their positions (find_packed_sequence_indices). use_cache only asks for a cache as well, and leaves logits as they are.
# Seen: with use_cache=True, the default of a configuration, the second text sees the first; with False it does not. The masks are not looked at for
#   packed texts once there is a cache, an empty one included. In gpt-oss and AFMoE they see each other always: these two models do not hand their
#   positions to create_causal_mask. Nothing is said. Trainer sets use_cache to False, so its training is right, except for these two.
# Why it matters: hidden states for a draft head are gathered by a plain call of the model, whose default is a cache. All texts of a row but the first
#   then have states that no server will see.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from transformers import (
    AfmoeConfig, AfmoeForCausalLM, DataCollatorWithFlattening, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig,
    MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM,
)

print({name: version(name) for name in ("transformers", "torch")})
sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
heads, experts = dict(head_dim=16), dict(num_local_experts=4, num_experts_per_tok=4)
cases = [(LlamaForCausalLM, LlamaConfig(**sizes)), (Qwen3ForCausalLM, Qwen3Config(**sizes, **heads))]
cases.append((MixtralForCausalLM, MixtralConfig(**sizes, **experts)))
cases.append((GptOssForCausalLM, GptOssConfig(**sizes, **heads, **experts)))
cases.append((AfmoeForCausalLM, AfmoeConfig(**sizes, **heads, num_dense_layers=2)))
generator = torch.Generator().manual_seed(5)
texts = [torch.randint(4, 100, (length,), generator=generator).tolist() for length in (14, 10)]
row = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": text} for text in texts])
print("the collator gives", sorted(row), "positions", row["position_ids"][0].tolist())
for kind, config in cases:
    model = kind._from_config(config, attn_implementation="eager").eval()
    assert config.use_cache
    generator.manual_seed(1)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.15, generator=generator)
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([text]), use_cache=False).logits[0] for text in texts])
        for cache in ({}, {"use_cache": True}, {"use_cache": False}):
            gaps = (model(input_ids=row["input_ids"], position_ids=row["position_ids"], **cache).logits[0] - alone).abs().amax(1)
            print(f"{kind.__name__}, {cache or 'default'}: first text {gaps[:14].max():.5f} from it alone, second text {gaps[14:].max():.5f}")
            wrong = cache.get("use_cache", True) or kind in (GptOssForCausalLM, AfmoeForCausalLM)
            assert gaps[:14].max() < 1e-3 and (gaps[14:].max() > 0.1 if wrong else gaps.max() < 1e-3)
PYTHON
