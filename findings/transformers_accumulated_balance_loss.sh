#!/usr/bin/env bash
# transformers: gradient accumulation multiplies the loss that balances experts, and label smoothing drops it.
# Expected: Trainer gives the same step for a batch of 8 as for 8 accumulated batches of 1, up to how the balance of a small batch differs.
#   "router_aux_loss_coef" weighs the balancing loss of a mixture of experts, which "output_router_logits" asks for. Here all rows are equal, so that
#   the loss of each batch is the same, and so is its balance.
# Seen: with N accumulated batches the balancing loss counts N times. Trainer no longer divides by N, because the loss of the tokens is divided by the
#   number of all tokens already ("num_items_in_batch"); the balancing loss, a mean over the batch, is added to that undivided (here
#   MixtralForCausalLM.forward; other families do as it does). With label_smoothing_factor it counts 0 times: Trainer takes the labels away from the
#   model and makes a loss of logits alone.
# Why it matters: one accumulates to fit a smaller GPU, and by 64 batches the coefficient of 0.02 is 1.28: experts are evened out at the cost of the
#   text. The logged loss rises with N as well, so that runs cannot be compared.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0 accelerate==1.15.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from transformers import MixtralConfig, MixtralForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

logging.set_verbosity_error()
print({name: version(name) for name in ("transformers", "accelerate", "torch")})
sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
sizes |= dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
text = torch.randint(128, (32,), generator=torch.Generator().manual_seed(5))


class Keep(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        self.grads = torch.cat([weight.grad.flatten() for weight in model.parameters()])


def step(size: int, batches: int, weight: float, **more: object) -> tuple[torch.Tensor, float]:
    """The gradient of one step on 8 equal texts, and the logged loss."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**sizes, router_aux_loss_coef=weight))
    options = dict(per_device_train_batch_size=size, gradient_accumulation_steps=batches, max_steps=1, max_grad_norm=0.0, optim="sgd")
    options |= dict(use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True)
    keep = Keep()
    trainer = Trainer(model, TrainingArguments("out", **options, **more), train_dataset=[{"input_ids": text, "labels": text}] * 8, callbacks=[keep])
    trainer.remove_callback(PrinterCallback)
    loss = trainer.train().training_loss
    return keep.grads, loss


base = None
for size, batches, more in ((8, 1, {}), (4, 2, {}), (2, 4, {}), (1, 8, {}), (8, 1, {"label_smoothing_factor": 0.1})):
    tokens, token_loss = step(size, batches, 0.0, **more)
    both, loss = step(size, batches, 0.02, **more)
    balance = both - tokens
    base = (tokens, balance, loss - token_loss) if base is None else base
    times, loss_times = (balance @ base[1] / (base[1] @ base[1])).item(), (loss - token_loss) / base[2]
    apart = ((tokens - base[0]).norm() / base[0].norm()).item()
    print(f"{batches} batches of {size} {more or ''}: the tokens' gradient is {apart:.5f} from the first one's, "
          f"the balancing loss counts {times:.3f} times in the gradient, {loss_times:.3f} in the logged loss")
    expected = 0 if more else batches
    assert abs(times - expected) < 0.05 and abs(loss_times - expected) < 0.05 and (more or apart < 1e-3)
PYTHON
