#!/usr/bin/env bash
# In transformers, Jamba forgets what came before when a text is read in pieces.
# Expected: "prefill_chunk_size" of generate reads a prompt in pieces to save memory (GenerationConfig), and a cache of earlier turns may be handed
#   to generate, which reads the rest (page "Caching"). Both give the text of one pass over the whole prompt.
# Seen: another text. The scan of a Mamba layer (modeling_jamba.py, JambaMambaMixer.forward) starts from zero in each call that brings more than one
#   token: it is not given the state that the cache holds. Pieces of one token are right, as is Bamba, whose scan is given it. All that
#   is said is that the scan in plain torch "is correct but much slower".
# Why it matters: a long prompt is what pieces are for, and a chat that keeps its cache brings several tokens a turn. Answers then come from the end
#   of the prompt alone, as far as the Mamba layers go, and the states that a draft head would read are those of another text.
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
from transformers import BambaConfig, BambaForCausalLM, JambaConfig, JambaForCausalLM

print({name: version(name) for name in ("transformers", "torch")})
sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
sizes |= dict(mamba_d_state=8, mamba_d_conv=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)
jamba = JambaConfig(**sizes, attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_dt_rank=8)
bamba = BambaConfig(**sizes, attn_layer_indices=[1, 3], mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_chunk_size=4)
generator = torch.Generator().manual_seed(5)
prompt = torch.randint(4, 100, (1, 40), generator=generator)
settings = dict(max_new_tokens=16, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True)
for kind, config in ((JambaForCausalLM, jamba), (BambaForCausalLM, bamba)):
    model = kind(config).eval()
    generator.manual_seed(1)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.15, generator=generator)
    whole = model.generate(prompt, **settings)
    wrong = {}

    def compare(name: str, answer) -> None:
        gap = (answer.logits[0] - whole.logits[0]).abs().max().item()
        differ = int((answer.sequences[0, -16:] != whole.sequences[0, -16:]).sum())
        print(f"{kind.__name__}, {name}: first token's logits {gap:.5f} from one pass, {differ} of 16 greedy tokens differ")
        wrong[name] = gap > 0.02
        assert wrong[name] or gap < 1e-3 and differ == 0

    compare("no cache", model.generate(prompt, use_cache=False, **settings))
    for size in (1, 7, 20):
        compare(f"pieces of {size}", model.generate(prompt, prefill_chunk_size=size, **settings))
    turn = model.generate(prompt[:, :30], do_sample=False, max_new_tokens=1, eos_token_id=None, return_dict_in_generate=True)
    compare("a cache of the first 30 tokens", model.generate(prompt, cache=turn.cache, **settings))
    right = kind is BambaForCausalLM
    expected = {"no cache": False, "pieces of 1": False} | {name: not right for name in wrong if name not in ("no cache", "pieces of 1")}
    assert wrong == expected, wrong
PYTHON
