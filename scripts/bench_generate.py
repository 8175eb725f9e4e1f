"""Plain decoding here compared with `generate` of transformers: same model and prompts, batch 1, greedy, in turns.

    python scripts/bench_generate.py recipes/quickstart/target

Plain decoding is the baseline of every speedup here, so it must be at least as fast as the library's own loop. Exit
status 1 if their outputs differ.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, add_target_options, exit_status, place, print_line, typed
from eval.data.prompts import prompts_hash
from eval.records.measure_settings import add_prompt_options, to_settings
from heads.core.files import check_file
from heads.core.strict_settings import Count

if TYPE_CHECKING:
    from heads.targets.frozen_target import FrozenTarget

WARM_UP_TOKENS = 16


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Plain decoding here against transformers generate.")
    add: Any = parser.add_argument
    add("target", type=place, help="a folder or a Hub id")
    add_target_options(parser)
    add("--repeats", type=typed(Count), default=3, help="times that each decodes each prompt; default: %(default)s")
    add_prompt_options(parser, num_prompts=16, max_prompt_tokens=512, max_new_tokens=128)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.measure.machine import environment, settle_threads
    from eval.measure.model_facts import target_facts
    from eval.measure.open_models import choose_prompts, open_target
    from eval.pages.texts import with_interval
    from eval.records.metrics import rate_ratio, rate_ratio_interval
    from eval.records.results import write_record
    from eval.runtime.engine import Engine, EngineOptions, Request

    if options.out:
        check_file(options.out, "--out")
    target, tokenizer = open_target(options.target, options)
    prompts = choose_prompts(target, tokenizer, to_settings(options), 1)
    print_line(settle_threads(target.device))
    longest = max(len(prompt.ids) for prompt in prompts)
    engine = Engine(target, None, EngineOptions(max_length=longest + options.max_new_tokens + 1))
    decoders: list[Callable[[Sequence[int], int], list[int]]] = [
        lambda ids, count: engine.generate([Request(ids, count)])[0].tokens,
        lambda ids, count: run_generate(target, ids, count),
    ]
    for decode in decoders:
        decode(prompts[0].ids, min(WARM_UP_TOKENS, options.max_new_tokens))
    seconds = [[0.0] * len(prompts) for _ in decoders]
    tokens = [[0] * len(prompts) for _ in decoders]
    different = 0
    for repeat in range(options.repeats):
        for i, prompt in enumerate(prompts):
            texts: list[list[int]] = [[], []]
            for n in (0, 1) if (repeat + i) % 2 == 0 else (1, 0):  # so that neither always finds the caches warm
                started = time.perf_counter()
                texts[n] = decoders[n](prompt.ids, options.max_new_tokens)
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
            "target": target_facts(target),
            **environment(target),
            "prompts": options.prompts,
            "num_prompts": len(prompts),
            "prompts_hash": prompts_hash(prompts),
            "max_new_tokens": options.max_new_tokens,
            "tokens": sum(ours[0]),
            "engine_seconds": sum(ours[1]),
            "generate_seconds": sum(theirs[1]),
            "ratio": {"mean": ratio, "ci95": interval},
            "different": different,
        }
        write_record(record, options.out)
    return 1 if different else 0


def run_generate(target: "FrozenTarget", prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the tokens of `generate`, called as a user would call it."""
    import torch

    ids = torch.tensor([prompt], device=target.device)
    generate: Any = target.model.generate  # Any, because in the library's types it is not callable
    with torch.inference_mode():
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


if __name__ == "__main__":
    sys.exit(exit_status(main))
