"""Unlikelihood training against loops (Welleck et al., arXiv 1908.04319, section 5.2): a model continues text greedily,
and its repetitions are made less likely.

A small model may repeat one line without end. Such text is easy to draft, so a target that often loops makes every
draft head look good. The paper counts every n-gram seen before as a repetition. Source code also repeats itself for
good reasons, so here only tokens after a second consecutive repetition count.
"""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from eval.measure.metrics import LOOP_PERIOD

TOKENS = 128
"""New tokens per continuation."""
LEAST_REPEATED = 12
"""Least number of repeated tokens after which a text counts as a loop, for short periods."""


@torch.no_grad()
def continuations(model: LlamaForCausalLM, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the prompts (B, P) with their greedy continuations (B, P + TOKENS), and a mask of the new tokens that
    continue a loop."""
    with torch.compiler.set_stance("force_eager"):  # the shapes change with each token
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
    """Return (B, T) bool: the tokens that continue a loop. For some period p <= LOOP_PERIOD, such a token and at least
    the max(2 p, LEAST_REPEATED) tokens before it equal the tokens p positions earlier."""
    looping = torch.zeros_like(tokens, dtype=torch.bool)
    for period in range(1, LOOP_PERIOD + 1):
        same = tokens[:, period:] == tokens[:, :-period]
        length = max(2 * period, LEAST_REPEATED) + 1
        if same.shape[1] >= length:
            looping[:, period + length - 1 :] |= same.unfold(1, length, 1).all(-1)
    return looping


def unlikelihood(logits: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of -log(1 - q) over the `chosen` (B, T) tokens (B, T), or 0 if none is chosen. q is their
    probability from logits (B, T, V). The gradient of a token's logit is q, so it does not vanish where the model is
    sure of its loop."""
    z = logits[chosen].float()  # (n, V)
    others = z.scatter(1, tokens[chosen][:, None], -torch.inf)
    return (z.logsumexp(1) - others.logsumexp(1)).sum() / chosen.sum().clamp_min(1)
