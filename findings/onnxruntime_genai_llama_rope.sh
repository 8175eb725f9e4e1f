#!/usr/bin/env bash
# onnxruntime-genai builds a Llama model without the scaling of its rotary embeddings.
# Expected: the model builder knows rope_type "linear" and "yarn" (builders/base.py, make_rope_init) and raises NotImplementedError for a type
#   that it does not know. Its README names Llama among the architectures. So a Llama model with either type is built right, or refused.
# Seen: the builder of Llama replaces make_rope_init by one that knows "llama3" alone. "linear" and "yarn" are dropped without a word, and the
#   ONNX model is that of a model without scaling. The same setting is kept for Mistral, whose builder is the base one.
# Why it matters: a target whose context was lengthened (LongChat, Yarn-Llama) becomes another model from the second token on. Its texts, its
#   hidden states and so what a draft head was trained on no longer agree.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx-ir==1.1.0 transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import contextlib
import io
from importlib.metadata import version

import numpy as np
import onnxruntime_genai
import torch
from onnxruntime_genai.models.builder import create_model, parse_extra_options
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("onnxruntime-genai", "onnxruntime", "onnx-ir", "transformers", "torch")})
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({chr(65 + place): place for place in range(256)}, [])))
sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
sizes |= dict(max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)
prompt = [place * 37 % 256 for place in range(24)]
plain = {"rope_type": "default", "rope_theta": 10000.0}
linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
yarn = {**linear, "rope_type": "yarn", "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
families = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM)}


def reference(family: str, rope: dict, folder: str) -> np.ndarray:
    config, kind = families[family]
    model = kind(config(**sizes, **({"sliding_window": None} if family == "mistral" else {}), rope_parameters=rope)).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(0, 0.15 if weight.ndim > 1 else 1.0, generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].numpy()


seen = {}
for family, rope in (("llama", plain), ("llama", linear), ("llama", yarn), ("mistral", linear)):
    case = f"{family}, {rope['rope_type']}"
    without = reference(family, plain, "unused")
    right = reference(family, rope, case)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        options = parse_extra_options(None, case, f"{case}, built", "fp32", "cpu", "cache", [])
        create_model(None, case, f"{case}, built", "fp32", "cpu", "cache", **options)
    model = onnxruntime_genai.Model(f"{case}, built")
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=64)
    steps = onnxruntime_genai.Generator(model, parameters)
    found = []
    for token in prompt:
        steps.append_tokens([token])
        found.append(np.array(steps.get_logits()).reshape(-1))
    gap = [float(np.abs(np.array(found) - logits).max()) for logits in (right, without)]
    print(f"{case:15s} largest gap of a logit to the model {gap[0]:.4f}, to the model without scaling {gap[1]:.4f}", flush=True)
    seen[case] = [value < 1e-3 for value in gap]
expected = {"llama, default": [True, True], "llama, linear": [False, True], "llama, yarn": [False, True], "mistral, linear": [True, False]}
assert seen == expected, seen
PYTHON
