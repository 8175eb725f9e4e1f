#!/usr/bin/env bash
# transformers: with drafts, greedy text after a prefilled cache is another one.
# Expected: a cache of the beginning of a prompt may be handed to generate, which then reads the rest alone (page "Caching", "Prefill a cache"). Assisted
#   generation and prompt lookup give the text of the target alone (page "Generation strategies"). Where a cache does not fit, generate raises an error.
# Seen: with "cache" and "assistant_model" or "prompt_lookup_num_tokens" the whole prompt goes through the model once more, behind the
#   tokens of the cache: the cache holds its beginning twice, and all text follows from that. Without drafts, or without a cache, the text is right.
# Why it matters: a system prompt read once and drafts are the two usual ways to make answers faster. Together they give other answers, silently.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from copy import deepcopy
from importlib.metadata import version

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

print({name: version(name) for name in ("transformers", "torch")})
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0)).eval()
generator = torch.Generator().manual_seed(0)
for weight in model.parameters():
    if weight.ndim > 1:
        weight.data.normal_(0, 0.3, generator=generator)
prompt = torch.randint(3, 64, (1, 20), generator=generator)
ways = {"alone": {}, "assistant": {"assistant_model": deepcopy(model)}, "prompt lookup": {"prompt_lookup_num_tokens": 4}}
right = model.generate(prompt, max_new_tokens=32, do_sample=False)

for read in (0, 1, 10, 19):
    for way, drafts in ways.items():
        more = {}
        if read:
            with torch.no_grad():
                more = {"cache": model(prompt[:, :read], cache=DynamicCache(config=model.config)).cache}
        found = model.generate(prompt, max_new_tokens=32, do_sample=False, return_dict_in_generate=True, **more, **drafts)
        differ = (found.sequences != right)[0, 20:]
        first = int(differ.nonzero()[0]) if differ.any() else None
        held = found.cache.get_seq_length()
        print(f"{read:2d} of 20 tokens in the cache, {way:13}: the cache ends with {held} tokens for a text of {right.shape[1]}; "
              + ("the text is right" if first is None else f"another text from new token {first} on"))
        wrong = read > 0 and way != "alone"
        # The last token, or with drafts the last two, need not have been read.
        assert 49 <= held - read * wrong <= 51 and (first is not None) == wrong, (read, way)
PYTHON
