#!/usr/bin/env bash
# transformers: Llama 4's settings for balancing its experts change nothing; no loss that balances them is ever computed.
# Expected: Llama4TextConfig has "output_router_logits", "router_aux_loss_coef" (0.001) and "router_jitter_noise". In other mixtures of experts (Mixtral,
#   Qwen3-MoE, gpt-oss) the first two add a loss that evens out the experts, weighed by the coefficient, and report it as "aux_loss".
# Seen: with any coefficient the loss and all gradients are those of a coefficient of 0, to the bit. The output has the router's logits, asked for by
#   the same setting, and no "aux_loss". Noise at the router changes nothing in training either. Nothing warns.
# Why it matters: one trains Llama 4 in the belief that its experts are kept even, as a sweep over the coefficient seems to say: it has no effect, so
#   that it looks safe. Experts that are not balanced die out one by one, and the loss shows it late.
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
from transformers import Llama4ForCausalLM, Llama4TextConfig, MixtralConfig, MixtralForCausalLM

print({name: version(name) for name in ("transformers", "torch")})
sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
sizes |= dict(num_local_experts=4, num_experts_per_tok=1)
text = torch.randint(128, (2, 24), generator=torch.Generator().manual_seed(0))


def step(kind: type, config: object) -> tuple[object, torch.Tensor]:
    """The output of a training step and the gradient of all weights."""
    torch.manual_seed(0)
    model = kind(config).train()
    torch.manual_seed(1)
    output = model(text, labels=text)
    output.loss.backward()
    return output, torch.cat([weight.grad.flatten() for weight in model.parameters()])


for kind, make, more in ((MixtralForCausalLM, MixtralConfig, {}), (Llama4ForCausalLM, Llama4TextConfig, dict(head_dim=8, intermediate_size_mlp=48))):
    bare, bare_grad = step(kind, make(**sizes, **more))
    for name, value in (("router_aux_loss_coef", 1.0), ("router_aux_loss_coef", 1000.0), ("router_jitter_noise", 0.5)):
        asked = {"output_router_logits": True} if name == "router_aux_loss_coef" else {}
        output, grad = step(kind, make(**sizes, **more, **asked, **{name: value}))
        change = (grad - bare_grad).abs().max().item()
        print(f"{kind.__name__}, {name} {value:g}: loss {output.loss.item():.4f} (without: {bare.loss.item():.4f}), gradients change by up to "
              f"{change:.4f}, router logits of {len(output.get('router_logits') or ())} layers, aux_loss {output.get('aux_loss')}")
        assert not asked or len(output.router_logits) == 2
        if kind is Llama4ForCausalLM:
            assert torch.equal(grad, bare_grad) and output.loss == bare.loss and output.get("aux_loss") is None
        else:
            assert change > 1e-4 and output.loss != bare.loss
PYTHON
