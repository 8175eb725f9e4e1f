#!/usr/bin/env bash
# transformers: with classifier-free guidance and drafts, greedy text is another one.
# Expected: "guidance_scale" mixes the logits with those of the text without its prompt (class UnbatchedClassifierFreeGuidanceLogitsProcessor).
#   Assisted generation and prompt lookup give the text of the target alone (page "Generation strategies"); generate raises an error for
#   settings that it cannot combine with them, such as groups of beams.
# Seen: another text from one of the first tokens on, with an assistant model (even the target itself) as with prompt lookup. The processor reads the
#   last token of what it is given into a cache of its own at each call; drafts that are rejected, and the first ones of later rounds, stay in it.
# Why it matters: both are arguments of one call, and each is right alone. A processor that holds state, of a user's own too, is not told which drafts
#   were rejected; a comparison of drafted and plain text without guidance finds no fault.
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
from transformers import LlamaConfig, LlamaForCausalLM

print({name: version(name) for name in ("transformers", "torch")})
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def guided(model: LlamaForCausalLM, prompt: torch.Tensor, scale: float) -> torch.Tensor:
    """Greedy text by the formula of the docstring, every text anew and without a cache."""
    text = prompt
    for _ in range(32):
        with torch.no_grad():
            own, free = (model(part, use_cache=False).logits[:, -1].log_softmax(-1) for part in (text, text[:, prompt.shape[1] - 1 :]))
        text = torch.cat([text, (free + scale * (own - free)).argmax(-1, keepdim=True)], 1)
    return text


wrong = dict.fromkeys((1.0, 1.5), 0)
for seed in range(4):
    model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0)).eval()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.3, generator=generator)
    prompt = torch.randint(3, 64, (1, 12), generator=generator)
    prompt = torch.cat([prompt, prompt], 1)
    ways = {"alone": {}, "assistant": {"assistant_model": deepcopy(model)}, "prompt lookup": {"prompt_lookup_num_tokens": 4}}
    for scale in wrong:
        right = guided(model, prompt, scale)
        for way, drafts in ways.items():
            found = model.generate(prompt, max_new_tokens=32, do_sample=False, guidance_scale=scale, **drafts)
            differ = (found != right)[0].nonzero()
            print(f"seed {seed}, guidance {scale}, {way:13}: " + (f"another text from new token {int(differ[0]) - 24} on" if len(differ) else "right"))
            assert way != "alone" or not len(differ)
            wrong[scale] += len(differ) > 0
assert wrong == {1.0: 0, 1.5: 8}, wrong
PYTHON
