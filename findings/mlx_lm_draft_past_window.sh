#!/usr/bin/env bash
# mlx-lm: with a draft model, greedy text is not the target's once the tokens exceed a sliding window.
# Expected: speculative decoding gives the text of the target alone. speculative_generate_step undoes rejected tokens in the cache, and raises
#   "Speculative decoding requires a trimmable prompt cache" for a model whose cache cannot be cut.
# Seen: it asks once, while the cache is empty. RotatingKVCache, which mlx-lm makes for layers with a window, can be cut until the window is
#   full; after that trim_prompt_cache returns 0, nobody looks, and rejected drafts stay in the cache of every layer. The text changes within a few
#   tokens, without a word. The same model with a window wider than the text is exact.
# Why it matters: gpt-oss has a window of 128, Gemma 3 of 512 or 1,024, Olmo 3 of 4,096. Beyond it the text depends on the draft model, and the
#   acceptance that one measures is that of texts with wrong tokens in the context.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import torch
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.utils import load_model
from transformers import Olmo3Config, Olmo3ForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("mlx-lm", "mlx", "transformers", "torch")})
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
sizes |= dict(layer_types=["sliding_attention", "full_attention"], bos_token_id=None, eos_token_id=None, pad_token_id=None)
prompt = [place * 37 % 64 for place in range(8)]


def make(folder: str, seed: int, window: int) -> Olmo3ForCausalLM:
    model = Olmo3ForCausalLM(Olmo3Config(**sizes, sliding_window=window)).eval()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data.normal_(0 if weight.ndim > 1 else 1, 0.3 if weight.ndim > 1 else 0.1, generator=generator)
    model.save_pretrained(folder)
    config = json.loads(Path(folder, "config.json").read_text())
    # The base of the rotary embeddings under its former name, which mlx-lm reads.
    config["rope_theta"] = config["rope_parameters"]["full_attention"]["rope_theta"]
    Path(folder, "config.json").write_text(json.dumps(config))
    return model


def common(first: list[int], second: list[int]) -> int:
    return next((place for place, pair in enumerate(zip(first, second)) if pair[0] != pair[1]), len(first))


for window in (64, 16):
    for seed in range(4):
        reference = make("target", seed, window)
        make("draft", seed + 100, window)
        target = load_model(Path("target"))[0]
        draft = load_model(Path("draft"))[0]
        with torch.no_grad():
            text = list(prompt)
            for _ in range(40):
                text.append(int(reference(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        alone = [int(step[0]) for step in generate_step(mx.array(prompt), target, max_tokens=40)]
        steps = speculative_generate_step(mx.array(prompt), target, draft, max_tokens=40, num_draft_tokens=3)
        drafted = [int(step[0]) for step in steps]
        same = common(alone, text[8:]), common(drafted, alone)
        print(f"window {window}, seed {seed}: of 40 tokens mlx-lm alone has the first {same[0]} of transformers; with a draft model {same[1]}")
        assert same[0] == 40 and (same[1] == 40 if window == 64 else same[1] < 16), (window, seed, same)
PYTHON
