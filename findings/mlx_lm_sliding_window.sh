#!/usr/bin/env bash
# mlx-lm runs models with sliding windows as if they had none.
# Expected: "sliding_window" and "layer_types" of a configuration say which layers look at the last W tokens only (transformers, pages "Mistral",
#   "Phi-3", "Gemma2"). mlx_lm.load opens these families; its module of Llama follows both settings.
# Seen: Mistral, Phi-3, Qwen2, Qwen3, Starcoder2 and Gemma 2 attend to the whole prompt, without a word. In a model of one layer with a window of
#   6 the logits of token 20 depend on token 0, which it cannot see.
# Why it matters: Phi-3-mini-4k has a window of 2,047, Mistral-7B-v0.1 and Gemma 2 one of 4,096. Beyond it the target that mlx-lm verifies with is
#   another one than the draft head was trained on: acceptance falls with the length of the prompt, on this engine alone.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
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
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config, Starcoder2Config

print({name: version(name) for name in ("mlx-lm", "mlx", "transformers")})
sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
sizes |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, sliding_window=6)
window = {"layer_types": ["sliding_attention"]}
qwen = {"use_sliding_window": True, "max_window_layers": 0, **window}
families = [(MistralConfig, {}), (Phi3Config, {}), (Qwen2Config, qwen), (Qwen3Config, {**qwen, "head_dim": 16}), (Starcoder2Config, {})]
families += [(Gemma2Config, {"head_dim": 16, **window})]
families += [(LlamaConfig, {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]})]
seen = {}
for kind, extra in families:
    kind(**{**sizes, **extra}).save_pretrained(kind.model_type)
    folder = Path(kind.model_type)
    config = json.loads((folder / "config.json").read_text())
    assert config["sliding_window"] == 6
    config["rope_theta"] = 10000.0
    (folder / "config.json").write_text(json.dumps(config))
    module = importlib.import_module("mlx_lm.models." + {"mistral": "llama"}.get(kind.model_type, kind.model_type))
    shapes = tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters())
    weights = {name: 0.2 * mx.random.normal(value.shape, key=mx.random.key(place)) for place, (name, value) in enumerate(shapes)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    model = load_model(folder)[0]
    prompt = list(range(3, 24))
    other = [99, *prompt[1:]]
    if kind is LlamaConfig:
        model.model.layers[1].self_attn.o_proj.weight *= 0  # leaves the layer with a window
    moved = mx.abs(model(mx.array([prompt]))[0, -1] - model(mx.array([other]))[0, -1]).max().item()
    seen[kind.model_type] = moved > 1e-4
    print(f"{kind.model_type:12s} window 6: another token 0 moves a logit of token 20 by {moved:.4f}")
assert seen == {**dict.fromkeys(("mistral", "phi3", "qwen2", "qwen3", "starcoder2", "gemma2"), True), "llama": False}, seen
PYTHON
