"""Figures of results.json: the metrics of a comparison's variants, and the audit of their tokens.

Under the rule `match`, and under any rule at temperature 0, every token must be the same as in plain decoding. Under
the other rules a sampled output is a different sample from the target's distribution than that of plain decoding, so a
comparison of the two cannot tell a correct output from a wrong one. Unit tests prove that the rules keep the
distribution, by summing over all possible outcomes (tests/eval/runtime/test_rejection.py). This file checks the rest:
the same engines, on the same prompts at temperature 0, must emit the same tokens as plain decoding, and every repeat
must emit the same tokens again.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eval.measure import metrics
from eval.measure.measure import Comparison, Variant, check_decoded, units_by_suite
from eval.measure.metrics import round_seconds
from eval.measure.prompts import spread
from eval.measure.results import Results
from eval.measure.roofline import bytes_read
from eval.measure.speedup_checks import why_unreliable
from eval.runtime.distribution import RowSampling
from eval.runtime.engine import PHASES, Output
from eval.runtime.identity import check_near_tie, first_difference
from eval.runtime.request import Detokenizer
from eval.runtime.sampling_params import Sampling
from heads.targets.gumbel import gumbel
from heads.targets.model import FrozenTarget

NUM_SAMPLES = 4
Divergence = dict[str, Any]


@dataclass
class Measured:
    """One setting of one head, audited."""

    head: int
    """Index of the head."""
    figures: Results
    suites: dict[str, Results]
    samples: list[Results]


def judge(
    result: Comparison, tokenizer: PreTrainedTokenizerBase, owners: Sequence[int]
) -> tuple[list[Measured], list[Divergence]]:
    """Return the audited figures of every variant, and the places where plain decoding did not repeat its own tokens.
    `owners`: index of each variant's head. Raise UserError if no output is longer than the prefill's token."""
    suites = ", ".join(sorted({prompt.suite for prompt in result.prompts}))
    check_decoded(result.plain.outputs[0].values(), suites)
    groups = units_by_suite(result.prompts, result.units)
    measured = []
    for owner, variant, divergences in zip(owners, result.drafting, audit(result, tokenizer), strict=True):
        whole = figures(result, variant, divergences, range(len(result.units)))
        parts = {name: figures(result, variant, divergences, units) for name, units in groups.items()}
        measured.append(Measured(owner, whole, parts, samples(result, variant, tokenizer)))
    return measured, find_divergences(result, result.plain, tokenizer)


def audit(comparison: Comparison, tokenizer: PreTrainedTokenizerBase) -> list[list[Divergence]]:
    """Return the places where each of `comparison.drafting` is not exact, in the form of `find_divergences`."""
    if not comparison.in_distribution:
        return [find_differences(comparison, variant, tokenizer) for variant in comparison.drafting]
    greedy = at_temperature_zero(comparison)
    return [
        find_differences(greedy, again, tokenizer) + find_divergences(comparison, variant, tokenizer, reference=variant)
        for variant, again in zip(comparison.drafting, greedy.drafting, strict=True)
    ]


def find_differences(comparison: Comparison, variant: Variant, tokenizer: PreTrainedTokenizerBase) -> list[Divergence]:
    """Return the places where a variant's tokens differ from plain decoding's. Each prompt whose text differs is
    decoded again plainly at the width of the rounds, and marked `near_tie` if rounding alone explains every text of it
    (`eval.runtime.identity`)."""
    found = find_divergences(comparison, variant, tokenizer)
    if not found:
        return found
    plain = comparison.plain.outputs[0]
    by_id = {(prompt.suite, prompt.id): i for i, prompt in enumerate(comparison.prompts)}
    for divergence in found:
        i = by_id[divergence["suite"], divergence["prompt"]]
        texts = {tuple(outputs[i].tokens) for outputs in variant.outputs} - {tuple(plain[i].tokens)}
        given = variant.engine, comparison.plain.engine, comparison.requests[i], plain[i].tokens
        checks = [check_near_tie(*given, text) for text in sorted(texts)]
        divergence["near_tie"] = all(check.is_near_tie for check in checks)
        divergence["flips"] = [asdict(mismatch) for check in checks for mismatch in check.mismatches]
    return found


def at_temperature_zero(comparison: Comparison) -> Comparison:
    requests = [replace(request, sampling=Sampling()) for request in comparison.requests]
    plain, *drafting = (Variant(variant.engine) for variant in (comparison.plain, *comparison.drafting))
    for unit, indices in enumerate(comparison.units):
        for variant in (plain, *drafting):
            variant.run(unit, indices, requests, 0)
    return Comparison(comparison.prompts, requests, comparison.units, plain, drafting)


def find_divergences(
    comparison: Comparison,
    variant: Variant,
    tokenizer: PreTrainedTokenizerBase,
    reference: Variant | None = None,
) -> list[Divergence]:
    """Return the places where a variant's tokens, in any repeat, differ from those of `reference` in its first repeat:
    at most one per prompt. Default reference: plain decoding. If the variant is `comparison.plain`, the function checks
    that plain decoding repeats its own tokens."""
    found = []
    first = reference or comparison.plain
    for i, prompt in enumerate(comparison.prompts):
        expected, sampling = first.outputs[0][i].tokens, comparison.requests[i].sampling
        for repeat, outputs in enumerate(variant.outputs):
            position = first_difference(expected, outputs[i].tokens)
            if position is None:
                continue
            pair = [tokens[position] if position < len(tokens) else None for tokens in (expected, outputs[i].tokens)]
            texts = [
                None if token is None else tokenizer.decode([token], clean_up_tokenization_spaces=False)
                for token in pair
            ]
            before = [*prompt.ids, *expected[:position]]
            found.append(
                {
                    "suite": prompt.suite,
                    "prompt": prompt.id,
                    "tree": str(variant.shape),
                    "against": "plain" if first is comparison.plain else "itself",
                    "temperature": sampling.temperature,
                    "repeat": repeat,
                    "position": position,
                    "plain_token": pair[0],
                    "token": pair[1],
                    "plain_text": texts[0],
                    "text": texts[1],
                    "top_two_margin": top_two_margin(variant.engine.target, before, sampling),
                }
            )
            break
    return found


@torch.no_grad()
def top_two_margin(target: FrozenTarget, ids: Sequence[int], sampling: Sampling) -> float:
    """Return the margin of the token after `ids`: the difference between the two highest scores. At temperature 0 the
    scores are log-probabilities, else log-probabilities of the sampling settings plus the position's noise."""
    hidden = target.alone(torch.tensor([ids], device=target.device))
    logits = target.shared.lm_head(hidden[:, -1:])  # (1, 1, V)
    if sampling.temperature == 0:
        scores = logits.log_softmax(dim=-1)
    else:
        rows = RowSampling(1, target.device)
        rows.set_row(0, sampling)
        position = torch.full((1, 1), len(ids), device=target.device)
        token_ids = torch.arange(logits.shape[-1], device=target.device)
        scores = rows.log_distribution(logits) + gumbel(rows.seed, position, token_ids)
    best = scores.flatten().topk(2).values
    return float(best[0] - best[1])


def figures(
    comparison: Comparison, variant: Variant, divergences: Sequence[Divergence], units: Sequence[int]
) -> Results:
    """Return the figures of one setting over some units (all of them, or those of a suite)."""
    indices = [i for unit in units for i in comparison.units[unit]]
    chosen = {(comparison.prompts[i].suite, comparison.prompts[i].id) for i in indices}
    own = [d for d in divergences if (d["suite"], d["prompt"]) in chosen]
    identical = len(indices) - len({(d["suite"], d["prompt"]) for d in own if not d.get("near_tie")})
    exact = exactness(len(indices), len(indices), identical, own, in_distribution=comparison.in_distribution)
    outputs = [variant.outputs[0][i] for i in indices]
    tau = metrics.tau(outputs)
    record: Results = {
        "tree": str(variant.shape),
        "depth": variant.shape.depth,
        "nodes": variant.shape.nodes,
        "temperature": comparison.requests[0].sampling.temperature,
        "rule": variant.engine.options.rule,
        "exact": exact,
        "tau": {
            "mean": tau,
            "ci95": metrics.tau_interval(outputs),
            "per_request": metrics.tau_per_request(outputs),
        },
        "tau_by_position": metrics.tau_by_position(outputs),
        "alpha": metrics.acceptance_by_depth(outputs, variant.shape.depth),
        "accepted_histogram": metrics.accepted_histogram(outputs, variant.shape.depth),
        "loop_share": metrics.loop_share([output.tokens for output in outputs]),
        "tokens": sum(len(output.tokens) for output in outputs),
        "undecoded": sum(len(output.tokens) == 1 for output in outputs),
        "draft_bytes": sum(bytes_read(variant.engine)),
    }
    if comparison.breakdowns:
        record |= speeds(comparison, variant, units, tau, is_exact=identical == len(indices))
    return record


def speeds(comparison: Comparison, variant: Variant, units: Sequence[int], tau: float, *, is_exact: bool) -> Results:
    """Return the times of one setting over some units, and its speedup if every output was exact."""
    turns, timed = comparison.turns(units), comparison.timed_turns(units)
    (tokens, plain), (made, drafted) = (comparison.rate(who, timed) for who in (comparison.plain, variant))
    steps, rounds = (who.round_seconds(timed) for who in (comparison.plain, variant))
    step_ms, round_ms = (
        {"mean": 1e3 * fmean(s or [0.0]), "median": 1e3 * median(s or [float("nan")])} for s in (steps, rounds)
    )
    phases = comparison.breakdowns[comparison.drafting.index(variant)]
    record: Results = {
        "baseline": {
            "tokens_per_second": metrics.tokens_per_second(tokens, plain),
            "ms_per_token": 1e3 * sum(plain) / max(sum(tokens), 1),
            "token_ms": metrics.token_percentiles(comparison.token_seconds(units, comparison.plain)),
            "step_ms": step_ms,
        },
        "speculative": {
            "tokens_per_second": metrics.tokens_per_second(made, drafted),
            "ms_per_round": round_ms["mean"],
            "round_ms": round_ms,
            "token_ms": metrics.token_percentiles(comparison.token_seconds(units, variant)),
            "breakdown_ms": {phase: 1e3 * phases[phase] for phase in PHASES},
            "plain_step_ms": 1e3 * phases["plain"],
        },
        "speedup": None,
        "turns": {"timed": len(timed), "left_out": len(turns) - len(timed)},
    }
    if is_exact:
        rates = (made, drafted), (tokens, plain)
        whole = sum(phases[phase] for phase in PHASES)
        medians = {"plain_seconds": step_ms["median"], "round_seconds": round_ms["median"]}
        record["speedup"] = {
            "measured": metrics.rate_ratio(*rates),
            "ci95": metrics.rate_ratio_interval(*rates),
            "predicted": metrics.predicted_speedup(tau, plain_seconds=phases["plain"], round_seconds=whole),
            "ratio_of_medians": metrics.predicted_speedup(tau, **medians),
            "tokens": min(sum(tokens), sum(made)),
        }
        record["speedup"]["reliable"] = why_unreliable({"tau": {"mean": tau}} | record) is None
    return record


def exactness(
    prompts: int, compared: int, identical: int, divergences: Sequence[Divergence], *, in_distribution: bool
) -> Results:
    """Return the record `exact`, with near-ties separate from divergences. If outputs are exact only in distribution,
    only those at temperature 0 are compared, and their counts are under `greedy`."""
    wrong = [d for d in divergences if not d.get("near_tie")]
    near = [d for d in divergences if d.get("near_tie")]
    record: Results = {"prompts": prompts, "identical": identical, "divergences": wrong}
    if in_distribution:
        greedy = {"prompts": compared, "identical": identical}
        record |= {"kind": "distribution", "identical": None, "greedy": greedy}
    return {**record, "near_ties": near} if near else record


def pooled_exactness(measurements: Sequence[Results], unrepeatable: Sequence[Divergence]) -> Results:
    """Return the record `exact` of all settings together. Plain decoding must repeat its own tokens too."""
    prompts = sum(m["exact"]["prompts"] for m in measurements)
    found = [d for m in measurements for key in ("divergences", "near_ties") for d in m["exact"].get(key, ())]
    compared = [m["exact"].get("greedy", m["exact"]) for m in measurements]
    identical = sum(exact["identical"] for exact in compared) - len(unrepeatable)
    in_distribution = any("kind" in m["exact"] for m in measurements)
    whole = sum(exact["prompts"] for exact in compared)
    return exactness(prompts, whole, identical, [*unrepeatable, *found], in_distribution=in_distribution)


def samples(comparison: Comparison, variant: Variant, tokenizer: PreTrainedTokenizerBase) -> list[Results]:
    """Return a few prompts with their outputs, cut into `pieces`, and those of plain decoding under `plain`. The times
    of both are those of one turn, the first of the prompt's that counts."""
    chosen = spread(range(len(comparison.prompts)), NUM_SAMPLES)
    unit_of = {i: unit for unit, indices in enumerate(comparison.units) for i in indices}
    turns = {unit: repeat for repeat, unit in reversed(comparison.timed_turns(range(len(comparison.units))))}

    def decoded(who: Variant, i: int) -> Results:
        repeat = turns.get(unit_of[i], 0)
        output = who.outputs[repeat][i]
        seconds = round_seconds(output, who.timings[repeat][unit_of[i]].round_seconds)
        return {"pieces": pieces(output, tokenizer), "round_ms": [round(1e3 * s, 3) for s in seconds]}

    return [
        {
            "suite": prompt.suite,
            "prompt_id": prompt.id,
            "prompt": prompt.text,
            "output": tokenizer.decode(output.tokens, clean_up_tokenization_spaces=False),
            "rounds": output.rounds,
            "tau": metrics.tau([output]),
            **decoded(variant, i),
            "plain": decoded(comparison.plain, i),
        }
        for i, prompt, output in ((i, comparison.prompts[i], variant.outputs[0][i]) for i in chosen)
    ]


def pieces(output: Output, tokenizer: PreTrainedTokenizerBase) -> list[Results]:
    """Return the output token by token: its text, its round (0 is the prefill), and True if it was drafted.

    If a token ends inside a character, its text is in the piece of the token that completes the character.
    """
    rounds = [0] + [number for number, count in enumerate(output.accepted, start=1) for _ in range(count + 1)]
    detokenizer = Detokenizer(tokenizer)
    return [
        {"text": detokenizer.push(token), "round": rounds[n], "drafted": drafted}
        for n, (token, drafted) in enumerate(zip(output.tokens, output.drafted(), strict=True))
    ]
