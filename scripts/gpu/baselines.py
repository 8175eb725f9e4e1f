"""The library's own ways of decoding, on the same model and prompts, batch 1, greedy."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from eval.runtime.request import Request
from heads.target.frozen import FrozenTarget

WAYS: dict[str, dict[str, Any]] = {
    "generate, eager": {},
    "assisted generation": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 5},
    "generate, static cache, compiled": {"cache_implementation": "static"},  # compiles for a minute, so it comes last
}


@torch.inference_mode()
def tokens_per_second(target: FrozenTarget, requests: Sequence[Request], way: str, draft: Any = None) -> float:
    """Tokens a second, prefill included; the first request warms up and does not count."""
    options = dict(WAYS[way])
    if way == "assisted generation":
        options["assistant_model"] = draft
    tokens, seconds = 0, 0.0
    generate: Any = target.model.generate
    for i, request in enumerate(requests):
        ids = torch.tensor([list(request.prompt)], device=target.device)
        torch.cuda.synchronize() if ids.is_cuda else None
        started = time.perf_counter()
        made = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=request.max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            use_cache=True,
            **options,
        )
        torch.cuda.synchronize() if ids.is_cuda else None
        if i:
            tokens += made.shape[1] - ids.shape[1]
            seconds += time.perf_counter() - started
    return tokens / seconds
