#!/usr/bin/env bash
# The exporter for OpenVINO (optimum-intel) drops a clamp of MPT.
# Expected: "clip_qkv" of "attn_config" (page "MPT" of transformers) clamps queries, keys and values to this bound. transformers does
#   it. The exporter takes MPT.
# Seen: the exported model does not clamp, and nothing is said. While it traces the model, the exporter puts an attention of its own in the place
#   of the model's, and that one leaves the clamp out. Logits are, within rounding, those of the same weights without the bound. OLMo, whose
#   setting has the same name, is exported right, so the clamp itself is no obstacle.
# Why it matters: the outliers that the bound is there for come back, and the exported target answers otherwise than the one that a draft learned
#   from. Random weights of the usual small spread do not show it, as no value reaches the bound.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q optimum-intel==1.27.0 optimum==2.1.0 optimum-onnx==0.1.0 openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 \
  nncf==3.4.0 transformers==4.57.6
cd "$work"
"$work/venv/bin/python" - <<'PYTHON' 2>log || { cat log; exit 1; }
from importlib.metadata import version

import numpy as np
import torch
from optimum.intel import OVModelForCausalLM
from transformers import AutoModelForCausalLM, MptConfig, MptForCausalLM, OlmoConfig, OlmoForCausalLM

print({name: version(name) for name in ("optimum-intel", "openvino", "transformers", "torch")})
mpt = dict(vocab_size=256, d_model=64, n_heads=4, n_layers=3, expansion_ratio=2, max_seq_len=64)
olmo = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=3, eos_token_id=0, pad_token_id=1)
tokens = torch.tensor([[place * 37 % 256 for place in range(24)]])


def logits(family: str, bound: float | None) -> np.ndarray:
    """Save the model with this bound; its logits in transformers."""
    if family == "MPT":
        model = MptForCausalLM(MptConfig(**mpt, attn_config={"clip_qkv": bound}))
    else:
        model = OlmoForCausalLM(OlmoConfig(**olmo, clip_qkv=bound))
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.2, generator=generator)
    model.save_pretrained("model")
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained("model").eval()(tokens).logits[0].numpy()


precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
for family in ("MPT", "OLMo"):
    free = logits(family, None)
    for bound in (None, 100.0, 2.0, 1.0):
        right = logits(family, bound)
        exported = OVModelForCausalLM.from_pretrained("model", export=True, load_in_8bit=False, ov_config=precision)
        found = np.array(exported(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits)[0]
        gap, gap_free = np.abs(found - right).max(), np.abs(found - free).max()
        differ = int((found.argmax(1) != right.argmax(1)).sum())
        print(f"{family}, clip_qkv {bound}: the export is {gap:.5f} from transformers, {gap_free:.5f} from it without the bound; "
              f"{differ} of 24 greedy tokens differ", flush=True)
        reached = bound in (1.0, 2.0)
        assert (gap < 2e-3) == (family == "OLMo" or not reached) and (gap_free < 2e-3) == (family == "MPT" or not reached), (family, bound)
PYTHON
