#!/usr/bin/env bash
# In transformers, DeepSeek-V4 compresses padding together with the text.
# Expected: a prompt padded on the left, with its attention mask, gets the logits that it gets alone; transformers asks for padding on that side when it
#   generates. The same model does give them where all its layers are "sliding_attention".
# Seen: each padded row is wrong from its first token on, by one token of padding as by 16. The compressors of "compressed_sparse_attention" and
#   "heavily_compressed_attention" (modeling_deepseek_v4.py, DeepseekV4HCACompressor and DeepseekV4CSACompressor) are not given the mask: they pool
#   padding into their entries, and cut the windows by places in the row and not by positions. The longest row is right. Nothing is said.
# Why it matters: answers regenerated in batches, and features gathered in batches, are not the target's, except for the longest prompt of each batch.
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
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

print({name: version(name) for name in ("transformers", "torch")})
sizes = dict(vocab_size=128, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=16)
sizes |= dict(q_lora_rank=32, o_groups=2, o_lora_rank=16, n_routed_experts=4, num_experts_per_tok=2, sliding_window=8, index_n_heads=2)
sizes |= dict(index_head_dim=16, index_topk=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128)
sizes |= dict(compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, mlp_layer_types=["moe"] * 2)
settings = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True)
generator = torch.Generator().manual_seed(5)
prompt = torch.randint(4, 100, (40,), generator=generator)
for layer in ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"):
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes, layer_types=[layer] * 2)).eval()
    generator.manual_seed(1)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.15, generator=generator)
    for pads in (0, 1, 4, 16):
        row = torch.cat([torch.zeros(pads, dtype=torch.long), prompt[pads:]])
        mask = torch.ones(2, 40, dtype=torch.long)
        mask[1, :pads] = 0
        batch = model.generate(torch.stack([prompt, row]), attention_mask=mask, **settings)
        gaps, differ = [], []
        for place, text in enumerate((prompt, prompt[pads:])):
            alone = model.generate(text[None], **settings)
            gaps.append((batch.logits[0][place] - alone.logits[0][0]).abs().max().item())
            differ.append(int((batch.sequences[place, -8:] != alone.sequences[0, -8:]).sum()))
        print(f"{layer}, {pads:2d} tokens of padding: first token's logits {gaps[1]:.5f} from the prompt alone, {differ[1]} of 8 greedy tokens "
              f"differ; the longest row {gaps[0]:.5f}, {differ[0]}")
        assert gaps[0] < 1e-3 and differ[0] == 0
        assert gaps[1] > 0.01 if layer != "sliding_attention" and pads else gaps[1] < 1e-3 and differ[1] == 0
PYTHON
