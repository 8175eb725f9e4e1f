"""Fit the temperatures of a DSpark head's confidence, for SGLang's `--speculative-dspark-confidence-sts-path`.

    python scripts/calibrate_head.py runs/dspark-smollm2-135m --prompts mine.jsonl --out sts.json

The target answers the prompts greedily with the head's drafts. By position, the confidence is compared with the share
of rounds whose draft tokens were accepted up to there: the expected calibration error, before and after, on these same
rounds. No text depends on the temperatures: with them SGLang decides how many draft tokens to verify.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.measure.command import Parser, add_head_options, exit_status, typed
from eval.measure.prompts import check_suites
from eval.measure.settings import Count, add_prompt_options, to_settings
from heads.core.errors import UserError
from heads.core.files import check_file, write_json


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Fit the temperatures of a DSpark head's confidence, for SGLang.")
    add_head_options(parser)
    parser.add_argument("--depth", type=typed(Count), help="draft tokens a round, as served; default: as trained")
    add_prompt_options(parser, num_prompts=64, max_prompt_tokens=512, max_new_tokens=256)
    parser.set_defaults(out=Path("sts.json"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.measure.calibration import fit_temperatures, record_confidence
    from eval.measure.folders import short_name
    from eval.measure.loading import choose_prompts, open_head
    from eval.runtime.engine import Engine, EngineOptions, Request
    from heads.core.tree import parse_shape
    from heads.published import is_published
    from heads.registry import untrained_kind
    from heads.saved import find_head, read_config

    check_file(options.out, "--out")
    check_suites(options.prompts)
    other = UserError(f"{options.head}: expected a DSpark head with a confidence head (head.confidence_weight)")
    if untrained_kind(options.head):
        raise other
    if not is_published(options.head) and not read_config(find_head(options.head))["config"].get("confidence_weight"):
        raise other
    opened = open_head(options)
    head: Any = opened.head
    if getattr(head, "confidence_head", None) is None:
        raise other
    shape = parse_shape(f"chain:{options.depth or head.depth}")
    prompts = choose_prompts(opened.target, opened.tokenizer, to_settings(options), shape.nodes)
    length = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens + shape.nodes
    engine = Engine(opened.target, head, EngineOptions(shape=shape, max_length=length))
    logits, accepted = record_confidence(engine, [Request(prompt.ids, options.max_new_tokens) for prompt in prompts])
    fitted = fit_temperatures(logits, accepted)
    write_json(options.out, {**fitted, "dataset": short_name(options.prompts), "num_samples": len(logits)})
    print(f"{len(logits):,} rounds of {len(prompts)} prompts, {shape}, greedy")
    print("position   accepted   temperature   calibration error, before    after")
    columns = zip(*(fitted[name] for name in ("temperatures", "ece_before", "ece_after")), strict=True)
    for k, (temperature, before, after) in enumerate(columns, start=1):
        share = float((accepted >= k).float().mean())
        print(f"{k:8}{share:11.3f}{temperature:14.3f}{before:28.4f}{after:9.4f}")
    print(
        f"written to {options.out}; to use it, start SGLang with SGLANG_RAGGED_VERIFY_MODE=compact and "
        f"--speculative-dspark-block-size {shape.depth} --speculative-dspark-confidence-sts-path {options.out}, and "
        "with a table of costs (python -m sglang.benchmark.dspark_sps_profiler)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
