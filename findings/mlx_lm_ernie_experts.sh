#!/usr/bin/env bash
# mlx-lm runs ERNIE 4.5 MoE without the correction by which its router chooses experts.
# Expected: a layer of ERNIE 4.5 MoE adds "moe_statics.e_score_correction_bias", a weight of its checkpoint, to the scores of its experts, takes
#   the best ones, and weighs them by the scores without it (transformers, class Ernie4_5_MoeTopKRouter; vLLM does so too). mlx_lm.load
#   opens the family ("ernie4_5_moe"), and follows a weight of this name in DeepSeek-V3, GLM-4-MoE and dots1.
# Seen: the module drops the weight while it reads the file, without a word, and takes other experts. Its logits are, within rounding, those of
#   transformers for the same file with this weight set to zero.
# Why it matters: the checkpoints of ERNIE-4.5-21B-A3B and -300B-A47B hold this weight. The target that mlx-lm verifies with is another one than
#   the draft head learned from, and a quantised copy that mlx-lm writes has lost the weight for good.
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
import numpy as np
import torch
from mlx_lm.utils import load_model
from safetensors import safe_open
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("mlx-lm", "mlx", "transformers", "torch")})
sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
sizes |= dict(moe_intermediate_size=48, moe_num_experts=8, moe_k=2, moe_num_shared_experts=1, tie_word_embeddings=False)
prompt = [place * 37 % 256 for place in range(24)]


def compare(seed: int, spread: float) -> tuple[float, float, int]:
    model = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**sizes)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "e_score_correction_bias" in name:
            weight.data.normal_(0, 1, generator=generator).mul_(spread)
        elif weight.ndim > 1:
            weight.data.normal_(0, 0.15, generator=generator)
        else:
            weight.data.fill_(1)
    model.save_pretrained("model")
    with safe_open("model/model.safetensors", "pt") as file:
        assert "model.layers.1.mlp.moe_statics.e_score_correction_bias" in file.keys()
    config = json.loads(Path("model/config.json").read_text())
    # The base of the rotary embeddings under its former name, as the published models have it.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    Path("model/config.json").write_text(json.dumps(config))
    found = np.array(load_model(Path("model"))[0](mx.array([prompt]))[0])
    with torch.no_grad():
        right = model(torch.tensor([prompt])).logits[0].numpy()
        for name, weight in model.named_parameters():
            if "e_score_correction_bias" in name:
                weight.data.zero_()
        without = model(torch.tensor([prompt])).logits[0].numpy()
    differ = int((found.argmax(1) != right.argmax(1)).sum())
    return float(np.abs(found - right).max()), float(np.abs(found - without).max()), differ


for seed in range(3):
    for spread in (0.0, 0.02, 0.2):
        gap, gap_without, differ = compare(seed, spread)
        print(f"seed {seed}, correction of spread {spread}: mlx-lm is {gap:.5f} from transformers, {gap_without:.5f} from it without "
              f"the correction; {differ} of 24 greedy tokens differ")
        assert gap_without < 1e-3 and (gap > 0.5) == (spread > 0), (seed, spread, gap, gap_without)
PYTHON
