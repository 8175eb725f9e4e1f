"""Sampled texts that are not the target's are found out, and honest ones pass."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.distribution import RowSampling
from eval.runtime.sampling_params import Sampling
from eval.servers.served_texts import compare_draws

TOKENS, VOCABULARY = 4000, 24
PROMPT = [1, 2, 3]


def target_of(logits: Tensor) -> Any:
    """A target whose logits (TOKENS, V) depend on the position alone."""
    return SimpleNamespace(
        device="cpu",
        vocab_size=logits.shape[-1],
        start_token=None,
        alone=lambda tokens: torch.arange(tokens.shape[1])[None] - len(PROMPT) + 1,
        shared=SimpleNamespace(lm_head=lambda states: logits[states]),
    )


@pytest.fixture(scope="module")
def logits() -> Tensor:
    """Some places with a sure token, and some with many likely ones."""
    draws = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, VOCABULARY, generator=draws) * torch.rand(TOKENS, 1, generator=draws) * 6


def log_p(logits: Tensor, **changes: Any) -> Tensor:
    rows = RowSampling(1, vocab_size=VOCABULARY)
    rows.set_row(0, Sampling(**changes))
    return rows.log_distribution(logits[None])[0]


def less_of_the_likeliest(logits: Tensor) -> Tensor:
    """0.90 of a token becomes 0.85, and so on."""
    p = logits.softmax(dim=-1)
    best = p.max(dim=-1, keepdim=True)
    without = p.scatter(-1, best.indices, 0.0)
    less = (best.values - 0.05).clamp_min(0)
    return (without * (1 - less) / (1 - best.values)).scatter(-1, best.indices, less).log()


FILTERED = {"temperature": 0.7, "top_k": 8, "top_p": 0.95}
SERVERS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor], bool]] = {
    "honest": (FILTERED, lambda z: log_p(z, **FILTERED), True),
    "in bfloat16": ({"temperature": 1.0, "top_k": 8}, lambda z: log_p(z.bfloat16(), temperature=1.0, top_k=8), True),
    "the temperature twice": ({"temperature": 0.7}, lambda z: log_p(z, temperature=0.49), False),
    "without its top-k": ({"temperature": 1.0, "top_k": 8}, lambda z: log_p(z, temperature=1.0), False),
    "noise": ({"temperature": 1.0}, torch.zeros_like, False),
    "another distribution": ({"temperature": 1.0}, less_of_the_likeliest, False),
}


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_that_lies_is_refused_and_an_honest_one_is_not(server: str, logits: Tensor) -> None:
    settings, served, is_honest = SERVERS[server]
    p = served(logits).exp()[: 800 if is_honest else TOKENS]
    seeds = range(100 if is_honest else 10)
    passed = 0
    for seed in seeds:
        text = p.multinomial(1, generator=torch.Generator().manual_seed(seed))[:, 0].tolist()
        passed += compare_draws(target_of(logits), [PROMPT], [text], Sampling(**settings)).excess() <= 1
    assert passed >= 95 if is_honest else passed == 0


def test_penalties_count_the_text_before_each_token(logits: Tensor) -> None:
    excess, sampling = [], Sampling(temperature=1.0, frequency_penalty=1.5)
    for penalty in (1.5, 0.0):
        draws = torch.Generator().manual_seed(0)
        counts = torch.zeros(VOCABULARY)
        text: list[int] = []
        for row in logits[:600]:
            token = int((row - penalty * counts).softmax(dim=-1).multinomial(1, generator=draws))
            counts[token] += 1
            text.append(token)
        excess.append(compare_draws(target_of(logits), [PROMPT], [text], sampling).excess())
    assert excess[0] <= 1 < excess[1]
