#!/usr/bin/env bash
# mlx-lm runs Qwen2-MoE with experts that count too little, where the configuration normalises their weights.
# Expected: "norm_topk_prob" is a setting of Qwen2MoeConfig (transformers, page "Qwen2MoE"): with it, the weights of the chosen experts are divided by
#   their sum. mlx_lm.load opens the family ("qwen2_moe") and follows the setting in Qwen3-MoE, OLMoE and DeepSeek-V3.
# Seen: it does not read the setting here. Its logits are, within rounding, those of transformers with "norm_topk_prob": false. With 2 of 8 equal experts
#   each counts a quarter of what it should.
# Why it matters: Qwen's own two checkpoints set it to false, so nobody notices. Those that mergekit-moe makes of dense Qwen2 models have it at true. All
#   shapes fit and the text stays fluent. A draft head that was trained with transformers meets another target, and a quantised copy keeps the fault.
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
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("mlx-lm", "mlx", "transformers", "torch")})
sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
sizes |= dict(moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1, tie_word_embeddings=False)
own = {Qwen2MoeForCausalLM: dict(shared_expert_intermediate_size=96), Qwen3MoeForCausalLM: dict(head_dim=16, mlp_only_layers=[])}
prompt = [place * 37 % 256 for place in range(24)]


def logits(norm: bool) -> np.ndarray:
    """The logits of transformers for the folder, with the setting at `norm`."""
    model = AutoModelForCausalLM.from_pretrained("model", norm_topk_prob=norm).eval()
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].numpy()


for kind, make in ((Qwen3MoeForCausalLM, Qwen3MoeConfig), (Qwen2MoeForCausalLM, Qwen2MoeConfig)):
    for seed in range(2):
        for norm in (False, True):
            model = kind(make(**sizes, **own[kind], norm_topk_prob=norm)).eval()
            generator = torch.Generator().manual_seed(seed)
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.data.normal_(0, 0.15, generator=generator)
            model.save_pretrained("model")
            config = json.loads(Path("model/config.json").read_text())
            assert config["norm_topk_prob"] is norm
            # Two settings under their former names, as the published models have them.
            config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "num_experts": sizes["num_experts"]}
            Path("model/config.json").write_text(json.dumps(config))
            found = np.array(load_model(Path("model"))[0](mx.array([prompt]))[0])
            right = logits(norm)
            gap, gap_without = (float(np.abs(found - each).max()) for each in (right, logits(False)))
            differ = int((found.argmax(1) != right.argmax(1)).sum())
            print(f"{kind.__name__}, seed {seed}, norm_topk_prob {norm}: mlx-lm is {gap:.5f} from transformers, {gap_without:.5f} from it with false; "
                  f"{differ} of 24 greedy tokens differ")
            if kind is Qwen2MoeForCausalLM:
                assert gap_without < 1e-3 and (gap > 0.5) == norm
            else:
                assert gap < 1e-3 and (gap_without > 0.5) == norm
PYTHON
