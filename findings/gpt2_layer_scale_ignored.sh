#!/usr/bin/env bash
# CTranslate2 and mlx-lm run GPT-2 without the scale of attention that grows with the layer.
# Expected: "scale_attn_by_inverse_layer_idx" is a setting of GPT2Config (transformers, page "OpenAI GPT2"): layer n divides its scores by n + 1, counted
#   from layer 0. Models were published with it: the GPT-2 of Stanford CRFM's Mistral project, small and medium, five seeds of each.
# Seen: the converter of CTranslate2 and mlx_lm.load read the folder without a word. Their logits are, within rounding, those of the same weights
#   without the setting. With one layer, where it changes nothing, and without it, both agree with transformers.
# Why it matters: all weights fit. Every layer but the first attends more sharply than it learned to, so that the text stays fluent and gets worse.
#   These models serve as small drafts and in studies of training, where such a fault is taken for a property of the model.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q ctranslate2==4.8.5 mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version
from pathlib import Path

import ctranslate2
import mlx.core as mx
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from mlx_lm.utils import load_model
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("ctranslate2", "mlx-lm", "mlx", "transformers", "torch")})
words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(256 + place): place for place in range(3, 256)}
tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
prompt = [place * 37 % 256 for place in range(24)]


def compare(layers: int, scaled: bool) -> dict[str, tuple[float, float, int]]:
    sizes = dict(vocab_size=256, n_embd=64, n_layer=layers, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(GPT2Config(**sizes, scale_attn_by_inverse_layer_idx=scaled)).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.3, generator=generator)
    model.transformer.save_pretrained("model")  # the names of the published files
    tokenizer.save_pretrained("model")
    config = json.loads(Path("model/config.json").read_text())
    assert config["scale_attn_by_inverse_layer_idx"] is scaled
    Path("model/config.json").write_text(json.dumps(config | {"n_ctx": 64}))  # as the published ones have it
    bare = GPT2LMHeadModel.from_pretrained("model", scale_attn_by_inverse_layer_idx=False).eval()
    with torch.no_grad():
        right, without = (each(torch.tensor([prompt])).logits[0].numpy() for each in (model, bare))
    TransformersConverter("model").convert("converted", force=True)
    engine = ctranslate2.Generator("converted", compute_type="float32")
    found = {"CTranslate2": np.array(engine.forward_batch([prompt], return_log_probs=False))[0]}
    found["mlx-lm"] = np.array(load_model(Path("model"))[0](mx.array([prompt]))[0])
    return {
        name: (float(np.abs(values - right).max()), float(np.abs(values - without).max()), int((values.argmax(1) != right.argmax(1)).sum()))
        for name, values in found.items()
    }


for layers, scaled in ((4, False), (1, True), (2, True), (4, True), (12, True)):
    for name, (gap, gap_without, differ) in compare(layers, scaled).items():
        print(f"{layers} layers, scaled by layer {scaled}: {name} is {gap:.5f} from transformers, {gap_without:.5f} from it without the scale; "
              f"{differ} of 24 greedy tokens differ")
        assert gap_without < 1e-2 and (gap > 0.1) == (scaled and layers > 1), (layers, scaled, name, gap, gap_without)
PYTHON
