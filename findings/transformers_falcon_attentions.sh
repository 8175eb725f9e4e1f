#!/usr/bin/env bash
# transformers: Falcon sees the future where attentions are asked for, and eager attention adds ALiBi twice.
# Expected: output_attentions=True returns attentions as well, and leaves logits and hidden states as they are. All implementations of
#   attention compute the same, so the page "Attention backends"; without ALiBi eager attention and sdpa do.
# Seen: with sdpa, the default, output_attentions=True takes the eager branch with the mask that was made for sdpa. That is a mask of truth values,
#   and is added to the scores as 0 and 1: each token attends to all that follow. With "alibi", the bias is put into the mask, for sdpa, and the
#   eager branch adds it to the scores once more. Where queries are zero the probabilities follow twice the slopes of ALiBi. Nothing warns.
# Why it matters: falcon-7b and -40b have no ALiBi, falcon-rw-1b and -7b have it. Hidden states that are kept in a run with output_attentions=True
#   tell a draft head the next token, and its loss looks far too good; logits and a perplexity of such a run are wrong as well. Eager
#   attention is what one takes as the reference for an engine or an export.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON' 2>&1 | tee said
from importlib.metadata import version

import torch
from transformers import FalconConfig, FalconForCausalLM

print({name: version(name) for name in ("transformers", "torch")})
heads, width, length = 4, 64, 24
sizes = dict(vocab_size=256, hidden_size=width, num_hidden_layers=3, num_attention_heads=heads, max_position_embeddings=128)
kinds = {"falcon-7b": dict(multi_query=True, parallel_attn=True, bias=False, alibi=False)}
kinds["falcon-40b"] = dict(new_decoder_architecture=True, num_kv_heads=2, bias=False, alibi=False)
kinds["falcon-rw"] = dict(multi_query=False, parallel_attn=False, bias=True, alibi=True)
prompt = torch.tensor([[place * 37 % 256 for place in range(length)]])
other_end = torch.cat([prompt[:, :-1], prompt[:, :1]], dim=1)


def make(attention: str, seed: int, settings: dict) -> FalconForCausalLM:
    model = FalconForCausalLM._from_config(FalconConfig(**sizes, **settings), attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        is_norm = name.endswith(("norm.weight", "ln_f.weight", "ln_attn.weight", "ln_mlp.weight"))
        weight.data.normal_(1 if is_norm else 0, 0.2, generator=generator)
    return model


def gap(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())


with torch.no_grad():
    for kind, settings in kinds.items():
        for seed in range(3):
            model = make("sdpa", seed, settings)
            logits = model(prompt).logits
            asked = model(prompt, output_attentions=True).logits
            of_eager = gap(make("eager", seed, settings)(prompt).logits, logits)
            of_asked = gap(asked, logits)
            future = gap(model(other_end).logits[0, :-1], logits[0, :-1])
            future_asked = gap(model(other_end, output_attentions=True).logits[0, :-1], asked[0, :-1])
            print(f"as {kind}, seed {seed}: from sdpa, eager is {of_eager:.5f}, and sdpa with output_attentions=True {of_asked:.5f}. Another last "
                  f"token changes the logits before it by {future:.5f}, with output_attentions=True by {future_asked:.5f}")
            assert of_asked > 0.05 and future < 1e-4 and (of_eager > 0.05) == settings["alibi"]
            assert (future_asked < 1e-4) == settings["alibi"]

    model = make("eager", 0, kinds["falcon-rw"])
    for weight in model.transformer.h[0].self_attention.query_key_value.parameters():
        weight.zero_()
    seen = model(prompt, output_attentions=True).attentions[0][0, :, -1]
    # The slopes of ALiBi's paper; Falcon divides scores and bias by the root of the width of a head.
    bias = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])[:, None] * torch.arange(length) / (width // heads) ** 0.5
    once, twice = gap(seen, bias.softmax(-1)), gap(seen, (2 * bias).softmax(-1))
    print(f"queries of zero: probabilities are {once:.5f} from ALiBi, {twice:.5f} from twice ALiBi")
    assert twice < 1e-5 < 1e-2 < once, (once, twice)
PYTHON
if grep -iE "warn|attentions?.*support" said | grep -v "^as "; then exit 1; fi
