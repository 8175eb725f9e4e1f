#!/usr/bin/env bash
# CTranslate2 and mlx-lm run a Llama model with another activation than its configuration says.
# Expected: "hidden_act" is a setting of LlamaConfig (transformers, page "Llama"), and models were published with other values than "silu"
#   (ReluLLaMA: "relu"). A program that has SiLU alone refuses them, as vLLM's Llama does ("Unsupported activation").
# Seen: the converter of CTranslate2 and mlx_lm.load read the folder without a word and compute SiLU. Their logits are, within rounding, those
#   of the same weights with hidden_act "silu". CTranslate2 reads the setting of other families (OPT, GPT-2).
# Why it matters: all shapes fit, so nothing fails. The hidden states that a draft head reads are another model's, and one looks for the fault
#   in the head, in rounding or in the template.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q ctranslate2==4.8.5 mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
from pathlib import Path

import ctranslate2
import mlx.core as mx
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from mlx_lm.utils import load_model
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("ctranslate2", "mlx-lm", "mlx", "transformers", "torch")})
words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(256 + place): place for place in range(3, 256)}
tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
prompt = [place * 37 % 256 for place in range(24)]


def logits(activation: str) -> np.ndarray:
    model = LlamaForCausalLM(LlamaConfig(**sizes, hidden_act=activation)).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(0, 0.15 if weight.ndim > 1 else 1.0, generator=generator)
    model.save_pretrained(activation)
    tokenizer.save_pretrained(activation)
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].numpy()


with_silu = logits("silu")
for activation in ("relu", "gelu_pytorch_tanh"):
    right = logits(activation)
    TransformersConverter(activation).convert("converted", force=True)
    engine = ctranslate2.Generator("converted", compute_type="float32")
    found = {"CTranslate2": np.array(engine.forward_batch([prompt], return_log_probs=False))[0]}
    found["mlx-lm"] = np.array(load_model(Path(activation))[0](mx.array([prompt]))[0])
    for name, values in found.items():
        gap = float(np.abs(values - right).max())
        gap_silu = float(np.abs(values - with_silu).max())
        differ = int((values.argmax(1) != right.argmax(1)).sum())
        print(f"hidden_act {activation}: {name} is {gap:.3f} from it, {gap_silu:.5f} from silu; {differ} of 24 greedy tokens differ")
        assert gap > 0.1 and gap_silu < 1e-3, (activation, name, gap, gap_silu)
PYTHON
