#!/usr/bin/env bash
# transformers computes MPT with the same positions whatever "alibi_bias_max" and "alibi" say.
# Expected: the page "MPT" of transformers documents both settings of "attn_config". With "alibi" each head h of H adds -slope * distance to
#   its scores, where slope = 2 ** -(alibi_bias_max * h / H); without it nothing is added there. llama.cpp takes the first from its file
#   ("attention.max_alibi_bias").
# Seen: MptForCausalLM reads neither, without a word. Its logits are those of the formula for 8, and true, at every value; they are bit for bit
#   the same. "clip_qkv" and "softmax_scale" of the same dictionary do act.
# Why it matters: a model trained with other slopes runs with those of 8. A head
#   trained on its hidden states, or a p measured with it, belongs to another target than the one that llama.cpp serves.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, MptConfig, MptForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("transformers", "torch")})
heads, layers, width = 4, 3, 64
prompt = torch.tensor([[place * 37 % 256 for place in range(40)]])
distance = torch.arange(40)[:, None] - torch.arange(40)


def formula(weights: dict[str, torch.Tensor], bias_max: float, alibi: bool) -> torch.Tensor:
    """The logits of MPT, written out."""
    state = weights["transformer.wte.weight"][prompt[0]]
    slopes = torch.tensor([2 ** -(bias_max * head / heads) if alibi else 0.0 for head in range(1, heads + 1)])
    added = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
    for layer in range(layers):
        of = {name.split(".", 3)[3]: weight for name, weight in weights.items() if name.startswith(f"transformer.blocks.{layer}.")}
        mixed = functional.layer_norm(state, (width,), of["norm_1.weight"]) @ of["attn.Wqkv.weight"].T
        q, k, v = mixed.view(40, 3, heads, -1).permute(1, 2, 0, 3)
        attention = (q @ k.transpose(1, 2) / (width // heads) ** 0.5 + added).softmax(-1)
        state = state + (attention @ v).transpose(0, 1).reshape(40, width) @ of["attn.out_proj.weight"].T
        up = functional.layer_norm(state, (width,), of["norm_2.weight"]) @ of["ffn.up_proj.weight"].T
        state = state + functional.gelu(up) @ of["ffn.down_proj.weight"].T
    return functional.layer_norm(state, (width,), weights["transformer.norm_f.weight"]) @ weights["transformer.wte.weight"].T


def run(**attention: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    config = MptConfig(
        vocab_size=256, d_model=width, n_heads=heads, n_layers=layers, expansion_ratio=2, max_seq_len=64, attn_config=attention
    )
    model = MptForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.2, generator=generator)
    model.save_pretrained("model")
    model = AutoModelForCausalLM.from_pretrained("model").eval()
    for name, value in attention.items():
        assert getattr(model.config.attn_config, name) == value
    with torch.no_grad():
        return model(prompt).logits[0], {name: weight.detach() for name, weight in model.named_parameters()}


base, weights = run(alibi_bias_max=8, alibi=True)
for bias_max, alibi in ((8, True), (16, True), (4, True), (8, False)):
    found, _ = run(alibi_bias_max=bias_max, alibi=alibi)
    right = formula(weights, bias_max, alibi)
    gap, same = (found - right).abs().max().item(), torch.equal(found, base)
    differ = int((found.argmax(1) != right.argmax(1)).sum())
    print(f"alibi_bias_max {bias_max:2d}, alibi {alibi!s:5}: transformers is {gap:.5f} from the formula, {differ} of 40 greedy tokens differ; "
          f"equal to its own logits for 8 and True: {same}")
    assert same and (gap < 1e-3 if (bias_max, alibi) == (8, True) else gap > 0.3)
for name in ("clip_qkv", "softmax_scale"):
    gap = (run(**{name: 0.5})[0] - base).abs().max().item()
    print(f"{name} 0.5 moves the logits by {gap:.5f}")
    assert gap > 0.3
PYTHON
