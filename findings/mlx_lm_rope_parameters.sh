#!/usr/bin/env bash
# mlx-lm reads a folder that transformers 5 wrote, and computes other rotary embeddings.
# Expected: transformers 5 writes the base and the scaling of rotary embeddings as "rope_parameters" in config.json (its page "Utilities
#   for Rotary Embedding"). mlx_lm.load opens a Hugging Face folder; models/qwen3.py reads the new key, so the library knows it.
# Seen: the Llama, Mistral, Qwen2 and Phi-3 modules look for "rope_theta" alone. They take a base of their own (10000, for Qwen2
#   a million) and no scaling, without a word.
# Why it matters: a target that was tuned or merged with transformers 5 runs in mlx-lm as another model. Short prompts still read well, so the
#   lower acceptance of its draft head looks like a fault of the head.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q mlx-lm==0.32.2 'mlx[cpu]==0.32.4' transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import importlib
import json
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

print({name: version(name) for name in ("mlx-lm", "mlx", "transformers")})
sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
sizes |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False)
rope = {"rope_type": "default", "rope_theta": 500000.0}
prompt = mx.arange(3, 35)[None]


def logits(config: dict) -> mx.array:
    folder = Path(config["model_type"])
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder)[0](prompt)


seen = {}
for kind in (LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config):
    kind(**sizes, **({"head_dim": 16} if kind is Qwen3Config else {}), rope_parameters=rope).save_pretrained(kind.model_type)
    written = json.loads(Path(kind.model_type, "config.json").read_text())
    assert written["rope_parameters"]["rope_theta"] == 500000.0 and "rope_theta" not in written
    module = importlib.import_module("mlx_lm.models." + kind.model_type.replace("mistral", "llama"))
    shapes = tree_flatten(module.Model(module.ModelArgs.from_dict({**written, "rope_theta": 1.0})).parameters())
    weights = {name: 0.3 * mx.random.normal(value.shape, key=mx.random.key(place)) for place, (name, value) in enumerate(shapes)}
    mx.save_safetensors(f"{kind.model_type}/model.safetensors", weights)
    as_written = logits(written)
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    spelt = {base: logits({**old, "rope_theta": base}) for base in (10000.0, 500000.0, 1000000.0)}
    seen[kind.model_type] = [base for base, found in spelt.items() if mx.array_equal(as_written, found)]
    gap = mx.abs(as_written - spelt[500000.0]).max().item()
    print(f"{kind.model_type:8s} written with base 500000, run with {seen[kind.model_type]}; a logit moves by up to {gap:.2f}")
assert seen == {"llama": [1e4], "mistral": [1e4], "phi3": [1e4], "qwen2": [1e6], "qwen3": [5e5]}, seen
PYTHON
