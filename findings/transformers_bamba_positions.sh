#!/usr/bin/env bash
# In transformers, Bamba begins again at position 0 in each call with a cache.
# Expected: "position_ids" is an argument that may be left out; where a cache is given, the new tokens stand behind those that it holds. Other
#   families with rotary embeddings count so: below Llama, and Granite 4 (granitemoehybrid), whose layers are Bamba's.
# Seen: BambaModel.forward (modeling_bamba.py) takes 0, 1, 2, ... for the tokens of each call, whatever the cache holds. Decoding in a loop of one's own
#   turns the queries and keys of each token as if it were the first. With position_ids, and in generate, which gives them, logits are right.
# Why it matters: loops of one's own are how drafts are verified and how hidden states are gathered with a cache. Nothing fails, and a loop that is
#   right for a dozen families proposes and accepts the wrong tokens here.
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
from transformers import BambaConfig, BambaForCausalLM, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, LlamaConfig, LlamaForCausalLM

print({name: version(name) for name in ("transformers", "torch")})
sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
mamba = dict(mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=4)
hybrid = GraniteMoeHybridConfig(**sizes, **mamba, layer_types=["mamba", "attention"] * 2, position_embedding_type="rope", num_local_experts=0,
                                shared_intermediate_size=96)
cases = [(LlamaForCausalLM, LlamaConfig(**sizes)), (GraniteMoeHybridForCausalLM, hybrid)]
cases.append((BambaForCausalLM, BambaConfig(**sizes, **mamba, attn_layer_indices=[1, 3])))
generator = torch.Generator().manual_seed(5)
tokens = torch.randint(4, 100, (1, 40), generator=generator)
for kind, config in cases:
    model = kind(config).eval()
    generator.manual_seed(1)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.15, generator=generator)
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits[0]
        for given in (True, False):
            cache, found = None, []
            for start, end in [(0, 20), *((place, place + 1) for place in range(20, 40))]:
                places = {"position_ids": torch.arange(start, end)[None]} if given else {}
                out = model(tokens[:, start:end], cache=cache, use_cache=True, **places)
                cache = out.cache
                found.append(out.logits[0])
            gaps = (torch.cat(found) - whole).abs().amax(1)
            differ = int((torch.cat(found)[20:].argmax(1) != whole[20:].argmax(1)).sum())
            print(f"{kind.__name__}, position_ids {'given' if given else 'left out'}: first call {gaps[:20].max():.5f} from one pass, "
                  f"the next 20 tokens up to {gaps[20:].max():.5f}; {differ} of 20 greedy tokens differ")
            wrong = kind is BambaForCausalLM and not given
            assert gaps[:20].max() < 1e-3 and (gaps[20:].max() > 0.1 if wrong else gaps.max() < 1e-3 and differ == 0)
PYTHON
