#!/usr/bin/env bash
# mlx-lm mixes up queries, keys and values of a GPTBigCode model with "multi_query": false.
# Expected: "multi_query" is a setting of GPTBigCodeConfig (transformers, page "GPTBigCode"). Where it is false, the rows of c_attn stand head by
#   head: query, key and value of head 0, then of head 1; the source of transformers says that this is not the order of GPT-2. mlx-lm's
#   ModelArgs has the setting, and counts as many heads of keys as of queries where it is false.
# Seen: mlx-lm splits c_attn in a third of queries, one of keys and one of values, as GPT-2 would. Its logits are, within rounding, those that
#   transformers gives once the rows are reordered so. Nothing fails or warns, as the shapes are the same. With "multi_query": true all is right.
# Why it matters: a model of this family that was trained with full attention runs, and writes nonsense. One looks for the fault in the
#   quantisation or in the tokenizer, and no draft head fits it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("mlx-lm", "mlx", "transformers", "torch")})
heads, width = 4, 64
sizes = dict(vocab_size=256, n_embd=width, n_inner=96, n_layer=3, n_head=heads, n_positions=128, activation_function="gelu")
prompt = torch.tensor([[place * 37 % 256 for place in range(24)]])


def logits(model: GPTBigCodeForCausalLM) -> np.ndarray:
    with torch.no_grad():
        return model(prompt).logits[0].numpy()


for seed in range(3):
    for multi_query in (True, False):
        model = GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, multi_query=multi_query)).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            weight.data.normal_(1 if "ln_" in name and "weight" in name else 0, 0.2, generator=generator)
        model.save_pretrained("model")
        right = logits(model)
        found = np.array(load_model(Path("model"))[0](mx.array(prompt.numpy()))[0])
        gap = float(np.abs(found - right).max())
        differ = int((found.argmax(1) != right.argmax(1)).sum())
        print(f"seed {seed}, multi_query {multi_query}: mlx-lm is {gap:.5f} from transformers, {differ} of 24 greedy tokens differ")
        if multi_query:
            assert gap < 1e-3, gap
            continue
        for layer in model.transformer.h:
            for weight in layer.attn.c_attn.parameters():
                rows = weight.data.reshape(3, heads, width // heads, -1).transpose(0, 1)
                weight.data.copy_(rows.reshape(weight.shape))
        gap_reordered = float(np.abs(found - logits(model)).max())
        print(f"  and {gap_reordered:.5f} from transformers with the rows reordered")
        assert gap > 1 and gap_reordered < 1e-3, (gap, gap_reordered)
PYTHON
