"""Comparison of the engine's plain decoding with `generate` of transformers, on the same prompts in turns."""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from eval.benchmark.loading import chosen_prompts, facts_of, open_target
from eval.benchmark.metrics import rate_ratio, rate_ratio_interval
from eval.benchmark.results import write_results
from eval.reporting.format import with_interval
from eval.runtime.engine import Engine, EngineOptions, Request
from heads.files import check_file
from heads.target.model import FrozenTarget

WARM_UP_TOKENS = 16


def compare(options: argparse.Namespace) -> int:
    """Time both and print the ratio. Return 1 if their outputs differ, else 0."""
    if options.out:
        check_file(options.out, "--out")
    target, tokenizer = open_target(options.target, options)
    prompts = chosen_prompts(options, target, tokenizer, most_nodes=1)
    longest = max(len(prompt.ids) for prompt in prompts)
    engine = Engine(target, None, EngineOptions(max_length=longest + options.max_new_tokens + 1))

    def run_engine(ids: Sequence[int], max_new_tokens: int) -> list[int]:
        return engine.generate([Request(ids, max_new_tokens)])[0].tokens

    ways = run_engine, partial(run_generate, target)
    for way in ways:
        way(prompts[0].ids, min(WARM_UP_TOKENS, options.max_new_tokens))
    seconds = [[0.0] * len(prompts) for _ in ways]
    tokens = [[0] * len(prompts) for _ in ways]
    different = 0
    for repeat in range(options.repeats):
        for i, prompt in enumerate(prompts):
            texts: list[list[int]] = [[], []]
            for n in (0, 1) if (repeat + i) % 2 == 0 else (1, 0):  # so that neither always finds the caches warm
                started = time.perf_counter()
                texts[n] = ways[n](prompt.ids, options.max_new_tokens)
                seconds[n][i] += time.perf_counter() - started
                tokens[n][i] += len(texts[n])
            different += texts[0] != texts[1]
    ours, theirs = zip(tokens, seconds, strict=True)
    ratio, interval = rate_ratio(ours, theirs), rate_ratio_interval(ours, theirs)
    print(f"{len(prompts)} prompts, {options.max_new_tokens} new tokens, {options.repeats} repeats, prefill included")
    print(f"transformers generate   {sum(theirs[0]) / sum(theirs[1]):10.1f} tokens/s")
    print(f"engine, plain           {sum(ours[0]) / sum(ours[1]):10.1f} tokens/s")
    print(f"ratio                   {with_interval(ratio, interval)}")
    print(f"texts that differ       {different} of {len(prompts) * options.repeats}")
    if options.out:
        record = {
            **facts_of(options, target, prompts),
            "tokens": sum(ours[0]),
            "engine_seconds": sum(ours[1]),
            "generate_seconds": sum(theirs[1]),
            "ratio": {"mean": ratio, "ci95": interval},
            "different": different,
        }
        write_results(record, options.out)
    return 1 if different else 0


@torch.inference_mode()
def run_generate(target: FrozenTarget, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the tokens of `generate`, called as a user would call it."""
    ids = torch.tensor([prompt], device=target.device)
    generate: Any = target.model.generate  # Any, because in the library's types it is not callable
    output = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,  # even if the target's config disables it: without a cache the comparison makes no sense
        pad_token_id=target.eos_token_ids[0] if target.eos_token_ids else 0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
