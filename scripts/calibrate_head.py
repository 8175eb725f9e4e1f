"""Fit the temperatures of a DSpark head's confidence, for SGLang's `--speculative-dspark-confidence-sts-path`.

    python scripts/calibrate_head.py runs/dspark-smollm2-135m --prompts mine.jsonl --out sts.json

The target answers the prompts greedily with the head's drafts. By position, the confidence is compared with the share
of rounds whose draft tokens were accepted up to there: the expected calibration error, before and after, on these same
rounds. No text depends on the temperatures: with them SGLang decides how many draft tokens to verify.

They are fitted by sequential temperature scaling, as SGLang 0.5.23 fits and reads them (`sglang.benchmark.
dspark_sts_fit`):

    s_k = prod over j <= k of sigmoid(z_j / t_j)      estimates P(the first k draft tokens of a round are accepted)

z_j is the confidence's logit of the j-th draft token. In the order of the positions, t_k is the temperature at which
s_k has the least expected calibration error, with the temperatures before it fixed.

Letters: n rounds, K depth, G temperatures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, add_head_options, exit_status, typed
from eval.data.prompts import check_suites
from eval.records.measure_settings import add_prompt_options, to_settings
from heads.core.errors import UserError
from heads.core.files import check_file, write_json
from heads.core.strict_settings import Count

if TYPE_CHECKING:
    from torch import Tensor

    from eval.runtime.engine import Engine, Request

BINS = 15


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Fit the temperatures of a DSpark head's confidence, for SGLang; --out is sts.json by default.")
    add_head_options(parser)
    parser.add_argument("--depth", type=typed(Count), help="draft tokens a round, as served; default: as trained")
    add_prompt_options(parser, num_prompts=64, max_prompt_tokens=512, max_new_tokens=256)
    parser.set_defaults(out=Path("sts.json"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from eval.measure.open_models import choose_prompts, open_head
    from eval.records.result_folders import short_name
    from eval.runtime.engine import Engine, EngineOptions, Request
    from heads.core.tree import parse_shape
    from heads.published import is_published
    from heads.registry import untrained_kind
    from heads.saved import find_head, read_config

    check_file(options.out, "--out")
    check_suites(options.prompts)
    other = UserError(f"{options.head}: expected a DSpark head with a confidence head (head.confidence_weight)")
    is_ours = not untrained_kind(options.head) and not is_published(options.head)
    if is_ours and not read_config(find_head(options.head))["config"].get("confidence_weight"):
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
    for k, (temperature, before, after) in enumerate(zip(*fitted.values(), strict=True), start=1):
        share = float((accepted >= k).float().mean())
        print(f"{k:8}{share:11.3f}{temperature:14.3f}{before:28.4f}{after:9.4f}")
    print(
        f"written to {options.out}; to use it, start SGLang with SGLANG_RAGGED_VERIFY_MODE=compact and "
        f"--speculative-dspark-block-size {shape.depth} --speculative-dspark-confidence-sts-path {options.out}, and "
        "with a table of costs (python -m sglang.benchmark.dspark_sps_profiler)"
    )
    return 0


def record_confidence(engine: Engine, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """Decode requests, one at a time. Return the confidence's logits (n, K) of all rounds and their numbers of accepted
    draft tokens (n,), which the end of an output does not cut.

    The engine's batch size is 1, its draft a chain, and its head a DSpark with a confidence head. Raises UserError if
    no output has a round.
    """
    import torch

    from eval.core.progress import Progress
    from eval.runtime.round import read_prompts
    from heads.kernels.slots import round_up

    decoder = engine.decoder
    state = engine.decoder.state
    head = cast(Any, engine.decoder.head)
    logits = []
    accepted = []
    with Progress("confidence: output", len(requests)) as progress, torch.inference_mode():
        for request in requests:
            state.done.fill_(True)
            read_prompts(decoder, {0: request})
            while not state.done[0]:
                proposal = decoder.propose()
                logits.append(head.confidence(decoder.head_state, proposal.tokens))
                extent = min(round_up(int(state.length[0]) + engine.nodes), decoder.target.spec.capacity)
                features, verified = decoder.verify(proposal, extent)
                acceptance = decoder.rule.accept(*verified)
                accepted.append(acceptance.accepted)
                decoder.commit(proposal, acceptance, features)
            progress.advance()
    if not accepted:
        raise UserError("nothing was drafted: every output ended with its first token; use other prompts")
    return torch.cat(logits).cpu(), torch.cat(accepted).cpu()


def calibration_error(estimates: Tensor, outcomes: Tensor) -> Tensor:
    """Return the expected calibration errors (...) of probabilities (..., n): the mean over the rounds of |mean
    estimate - mean outcome| of their bin, of BINS equal ones. outcomes (n,): 0 or 1."""
    bins = (estimates * BINS).long().clamp_max(BINS - 1)
    gaps = estimates.new_zeros(*estimates.shape[:-1], BINS).scatter_add(-1, bins, estimates - outcomes)
    return gaps.abs().sum(-1) / len(outcomes)


def fit_temperatures(logits: Tensor, accepted: Tensor) -> dict[str, list[float]]:
    """Return the temperatures, and the errors before and after by position, under SGLang's names. logits (n, K);
    accepted (n,)."""
    import torch

    logits = logits.double()
    temperatures = torch.logspace(-1, 1, 41, dtype=torch.float64)
    plain = survival = logits.new_ones(len(logits))
    fitted: dict[str, list[float]] = {"temperatures": [], "ece_before": [], "ece_after": []}
    for k, position in enumerate(logits.T):
        outcomes = (accepted > k).double()
        plain = plain * position.sigmoid()
        estimates = survival * (position / temperatures[:, None]).sigmoid()  # (G, n)
        errors = calibration_error(estimates, outcomes)
        best = int(errors.argmin())  # the first of equal ones
        survival = estimates[best]
        fitted["temperatures"].append(float(temperatures[best]))
        fitted["ece_before"].append(float(calibration_error(plain, outcomes)))
        fitted["ece_after"].append(float(errors[best]))
    return fitted


if __name__ == "__main__":
    sys.exit(exit_status(main))
