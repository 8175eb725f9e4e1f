"""Unlikelihood of loops (Welleck et al., arXiv 1908.04319, section 5.2): a model continues text greedily, and what
repeats itself there is made less likely.

A small model left to itself repeats a line for ever. Such text is easy to draft, so a target that writes much of it
flatters every draft head. The paper takes every n-gram seen before for a repetition; source code repeats itself for
good reasons, so here only what follows a second repetition in a row counts.
"""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from eval.benchmark.metrics import LOOP_PERIOD

TOKENS = 128
"""New tokens of a continuation."""
LEAST_REPEATED = 12
"""Tokens that a loop of a short period has repeated before it counts as one."""


@torch.no_grad()
def continuations(model: LlamaForCausalLM, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts (B, P), each with its greedy continuation (B, P + TOKENS), and which tokens of that continue a loop."""
    with torch.compiler.set_stance("force_eager"):  # a step of one token has a shape of its own each time
        made: Tensor = cast(Any, model).generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            pad_token_id=0,
        )
    looping = repeats(made)
    looping[:, : prompts.shape[1]] = False
    return made, looping


def repeats(tokens: Tensor) -> Tensor:
    """(B, T) bool: the tokens (B, T) that continue a loop. For some period p <= LOOP_PERIOD each of them, and at least
    max(2 p, LEAST_REPEATED) tokens before it, equal the tokens p places earlier."""
    looping = torch.zeros_like(tokens, dtype=torch.bool)
    for period in range(1, LOOP_PERIOD + 1):
        same = tokens[:, period:] == tokens[:, :-period]
        length = max(2 * period, LEAST_REPEATED) + 1
        if same.shape[1] >= length:
            looping[:, period + length - 1 :] |= same.unfold(1, length, 1).all(-1)
    return looping


def unlikelihood(logits: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Mean of -log(1 - q) over the chosen (B, T) of the tokens (B, T), q their probability by logits (B, T, V); 0
    without any. The gradient in a token's logit is q, which does not vanish where the model is sure of its loop."""
    z = logits[chosen].float()  # (n, V)
    others = z.scatter(1, tokens[chosen][:, None], -torch.inf)
    return (z.logsumexp(1) - others.logsumexp(1)).sum() / chosen.sum().clamp_min(1)
