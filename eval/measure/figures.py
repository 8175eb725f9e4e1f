"""Figures of results.json: the metrics of a comparison's variants, and the audit of their tokens.

Under the rule `match`, and under any rule at temperature 0, every token must be the same as in plain decoding. Under
the other rules a sampled output is a different sample from the target's distribution than that of plain decoding, so a
comparison of the two cannot tell a correct output from a wrong one. Unit tests prove that the rules keep the
distribution, by summing over all possible outcomes (tests/eval/runtime/test_rejection.py). This file checks the rest:
the same engines, on the same prompts at temperature 0, must emit the same tokens as plain decoding, and every repeat
must emit the same tokens again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
from transformers import PreTrainedTokenizerBase

from eval.data.prompts import spread
from eval.measure.compare import Comparison, Variant, check_decoded, units_by_suite
from eval.measure.roofline import bytes_read
from eval.records import metrics
from eval.records.figures_schema import (
    Baseline,
    Divergence,
    Exact,
    Flip,
    Identical,
    Measurement,
    Speculative,
    Speedup,
    Spread,
    Tau,
    Turns,
)
from eval.records.metrics import round_seconds
from eval.records.schema import Decoded, Piece, Sample
from eval.records.speedup_checks import why_unreliable
from eval.runtime.engine import PHASES, Output
from eval.runtime.near_ties import Text, check_near_ties, first_difference, own_states, target_sampling
from eval.runtime.request import Detokenizer
from heads.kernels.gumbel import gumbel
from heads.methods.two_drafts import LookupFirst
from heads.targets.frozen_target import FrozenTarget

NUM_SAMPLES = 4


@dataclass
class Audited:
    """One setting of one head."""

    head: int
    """Index of the head."""
    figures: Measurement
    samples: list[Sample]


def judge(
    result: Comparison, tokenizer: PreTrainedTokenizerBase, owners: Sequence[int]
) -> tuple[list[Audited], list[Divergence]]:
    """Return the audited figures of every variant, and the places where plain decoding did not repeat its own tokens.
    `owners`: index of each variant's head. Raise UserError if no output is longer than the prefill's token."""
    check_decoded(result.plain.outputs[0].values(), ", ".join(sorted({prompt.suite for prompt in result.prompts})))
    groups = units_by_suite(result.prompts, result.units)
    audited = []
    for owner, variant, divergences in zip(owners, result.drafting, audit(result, tokenizer), strict=True):
        whole = figures(result, variant, divergences, range(len(result.units)))
        whole.suites = {name: figures(result, variant, divergences, units) for name, units in groups.items()}
        audited.append(Audited(owner, whole, samples(result, variant, tokenizer)))
    return audited, find_divergences(result, result.plain, tokenizer)


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
    (`eval.runtime.near_ties`)."""
    divergences = find_divergences(comparison, variant, tokenizer)
    plain = comparison.plain.outputs[0]
    by_id = {(prompt.suite, prompt.id): i for i, prompt in enumerate(comparison.prompts)}
    judged = []
    for divergence in divergences:
        i = by_id[divergence.suite, divergence.prompt]
        texts = {tuple(outputs[i].tokens) for outputs in variant.outputs} - {tuple(plain[i].tokens)}
        judged += [(divergence, (comparison.requests[i], plain[i].tokens, text)) for text in sorted(texts)]
        divergence.near_tie = True
    checks = check_near_ties(variant.engine, [given for _, given in judged])
    for (divergence, _), check in zip(judged, checks, strict=True):
        divergence.near_tie &= check.is_near_tie
        divergence.flips += [Flip(**vars(mismatch)) for mismatch in check.mismatches]
    return divergences


def at_temperature_zero(comparison: Comparison) -> Comparison:
    requests = [replace(r, sampling=r.sampling.model_copy(update={"temperature": 0.0})) for r in comparison.requests]
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
    first = reference or comparison.plain
    places = []
    for i in range(len(comparison.prompts)):
        expected = first.outputs[0][i].tokens
        for repeat, outputs in enumerate(variant.outputs):
            position = first_difference(expected, outputs[i].tokens)
            if position is not None:
                places.append((i, repeat, position))
                break
    beginnings = [(comparison.requests[i], first.outputs[0][i].tokens[:position]) for i, _, position in places]
    margins = top_two_margins(variant.engine.target, beginnings)
    divergences = []
    for (i, repeat, position), margin in zip(places, margins, strict=True):
        texts = first.outputs[0][i].tokens, variant.outputs[repeat][i].tokens
        plain, here = (token_at(position, tokens, tokenizer) for tokens in texts)
        divergences.append(
            Divergence(
                suite=comparison.prompts[i].suite,
                prompt=comparison.prompts[i].id,
                tree=str(variant.shape),
                against="plain" if first is comparison.plain else "itself",
                temperature=comparison.requests[i].sampling.temperature,
                repeat=repeat,
                position=position,
                plain_token=plain[0],
                token=here[0],
                plain_text=plain[1],
                text=here[1],
                top_two_margin=margin,
            )
        )
    return divergences


def token_at(
    position: int, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, str] | tuple[None, None]:
    """Return the token at a position and its text, or nothing if the output ended before."""
    if position >= len(tokens):
        return None, None
    return tokens[position], str(tokenizer.decode([tokens[position]], clean_up_tokenization_spaces=False))


@torch.no_grad()
def top_two_margins(target: FrozenTarget, given: Sequence[Text]) -> list[float]:
    """Return the margins of the tokens that follow the beginnings of outputs, `texts`: the differences between the two
    highest scores. At temperature 0 the scores are log-probabilities, after penalties, else log-probabilities of the
    sampling settings plus the position's noise."""
    margins = []
    for (request, text), hidden in zip(given, own_states(target, given), strict=True):
        logits = target.shared.lm_head(hidden[None, -1:])  # (1, 1, V)
        rows = target_sampling(target, request)
        ids = torch.tensor(text, dtype=torch.int64, device=target.device)
        counts = ids.bincount(minlength=target.vocab_size)[None, None] if rows.penalised else None
        if request.sampling.temperature == 0:
            scores = rows.penalise(logits, counts).log_softmax(dim=-1)
        else:
            position = torch.full((1, 1), len(request.prompt) + len(text), device=target.device)
            noise = gumbel(rows.seed, position, torch.arange(logits.shape[-1], device=target.device))
            scores = rows.log_distribution(logits, counts) + noise
        best = scores.flatten().topk(2).values
        margins.append(float(best[0] - best[1]))
    return margins


def figures(
    comparison: Comparison, variant: Variant, divergences: Sequence[Divergence], units: Sequence[int]
) -> Measurement:
    """Return the figures of one setting over some units (all of them, or those of a suite)."""
    indices = [i for unit in units for i in comparison.units[unit]]
    ids = {(comparison.prompts[i].suite, comparison.prompts[i].id) for i in indices}
    differing = [d for d in divergences if (d.suite, d.prompt) in ids]
    identical = len(indices) - len({(d.suite, d.prompt) for d in differing if not d.near_tie})
    outputs = [variant.outputs[0][i] for i in indices]
    measurement = Measurement(
        tree=str(variant.shape),
        depth=variant.shape.depth,
        nodes=variant.shape.nodes,
        temperature=comparison.requests[0].sampling.temperature,
        rule=variant.engine.options.rule,
        exact=exactness(len(indices), len(indices), identical, differing, in_distribution=comparison.in_distribution),
        tau=Tau(
            mean=metrics.tau(outputs),
            ci95=metrics.tau_interval(outputs),
            per_request=metrics.tau_per_request(outputs),
        ),
        tau_by_position=metrics.tau_by_position(outputs),
        longest=max(output.start + len(output.tokens) for output in outputs),
        alpha=metrics.acceptance_by_depth(outputs, variant.engine.shape.depth),
        accepted_histogram=metrics.accepted_histogram(outputs, variant.engine.shape.depth),
        loop_share=metrics.loop_share([output.tokens for output in outputs]),
        tokens=sum(len(output.tokens) for output in outputs),
        undecoded=sum(len(output.tokens) == 1 for output in outputs),
        draft_bytes=sum(bytes_read(variant.engine)),
        busy_cores=comparison.others,
    )
    head = variant.engine.head
    if isinstance(head, LookupFirst):
        measurement.lookup = metrics.use_of_lookup(outputs)
        measurement.least_match = head.match
    vocabulary = None if head is None else head.vocabulary
    if vocabulary is not None and len(vocabulary) < variant.engine.target.vocab_size:
        written = torch.tensor([token for output in outputs for token in output.tokens[1:]])  # the first is not drafted
        measurement.undraftable = (
            float((~torch.isin(written, vocabulary.cpu())).float().mean()) if len(written) else 0.0
        )
    if comparison.breakdowns:
        add_speeds(measurement, comparison, variant, units, is_exact=identical == len(indices))
    return measurement


def add_speeds(
    measurement: Measurement, comparison: Comparison, variant: Variant, units: Sequence[int], *, is_exact: bool
) -> None:
    """Add the times of one setting over some units, and its speedup if every output was exact."""
    turns, timed = comparison.turns(units), comparison.timed_turns(units)
    plain, drafted = (comparison.rate(who, timed) for who in (comparison.plain, variant))
    plain_steps, rounds = (spread_ms(who.round_seconds(timed)) for who in (comparison.plain, variant))
    phases = dict(comparison.breakdowns[comparison.drafting.index(variant)])
    phases["draft"] *= head_share(comparison, variant, units)
    measurement.turns = Turns(timed=len(timed), left_out=len(turns) - len(timed))
    measurement.baseline = Baseline(
        tokens_per_second=metrics.tokens_per_second(*plain),
        ms_per_token=1e3 * sum(plain[1]) / max(sum(plain[0]), 1),
        token_ms=metrics.token_percentiles(comparison.token_seconds(units, comparison.plain)),
        step_ms=plain_steps,
    )
    measurement.speculative = Speculative(
        tokens_per_second=metrics.tokens_per_second(*drafted),
        ms_per_round=rounds.mean,
        round_ms=rounds,
        token_ms=metrics.token_percentiles(comparison.token_seconds(units, variant)),
        breakdown_ms={phase: 1e3 * phases[phase] for phase in PHASES},
        plain_step_ms=1e3 * phases["plain"],
    )
    measurement.speedup = None
    if is_exact:
        tau, whole = measurement.tau.mean, sum(phases[phase] for phase in PHASES)
        measurement.speedup = Speedup(
            measured=metrics.rate_ratio(drafted, plain),
            ci95=metrics.rate_ratio_interval(drafted, plain),
            predicted=metrics.predicted_speedup(tau, plain_seconds=phases["plain"], round_seconds=whole),
            ratio_of_medians=metrics.predicted_speedup(
                tau, plain_seconds=plain_steps.median, round_seconds=rounds.median
            ),
            tokens=min(sum(plain[0]), sum(drafted[0])),
        )
        measurement.speedup.reliable = why_unreliable(measurement) is None


def head_share(comparison: Comparison, variant: Variant, units: Sequence[int]) -> float:
    """Return the share of the rounds of some units that ran the head. On a CPU those in which a lookup drafts for every
    row do not."""
    if not (isinstance(variant.engine.head, LookupFirst) and variant.engine.on_host):
        return 1.0
    ran = total = 0
    for unit in units:
        outputs = [variant.outputs[0][i] for i in comparison.units[unit]]
        ran += len({o.first_round + n for o in outputs for n, copied in enumerate(o.copied) if not copied})
        total += variant.timings[0][unit].rounds
    return ran / max(total, 1)


def spread_ms(seconds: Sequence[float]) -> Spread:
    return Spread(mean=1e3 * fmean(seconds or [0.0]), median=1e3 * median(seconds or [float("nan")]))


def exactness(
    prompts: int, compared: int, identical: int, divergences: Sequence[Divergence], *, in_distribution: bool
) -> Exact:
    """Return the record `exact`, with near-ties separate from divergences. If outputs are exact only in distribution,
    only those at temperature 0 are compared, and their counts are under `greedy`."""
    exact = Exact(prompts=prompts, identical=identical, divergences=[d for d in divergences if not d.near_tie])
    if in_distribution:
        exact.kind = "distribution"
        exact.identical = None
        exact.greedy = Identical(prompts=compared, identical=identical)
    if near := [d for d in divergences if d.near_tie]:
        exact.near_ties = near
    return exact


def pooled_exactness(exacts: Sequence[Exact], unrepeatable: Sequence[Divergence]) -> Exact:
    """Return the record `exact` of all settings together. Plain decoding must repeat its own tokens too."""
    compared = [exact.greedy or exact for exact in exacts]
    return exactness(
        sum(exact.prompts for exact in exacts),
        sum(part.prompts for part in compared),
        sum(part.identical or 0 for part in compared) - len(unrepeatable),
        [*unrepeatable, *(d for exact in exacts for d in [*exact.divergences, *exact.near_ties])],
        in_distribution=any(exact.kind for exact in exacts),
    )


def samples(comparison: Comparison, variant: Variant, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return a few prompts with their outputs, cut into `pieces`, and those of plain decoding under `plain`. The times
    of both are those of one turn, the first of the prompt's that counts."""
    unit_of = {i: unit for unit, indices in enumerate(comparison.units) for i in indices}
    turns = {unit: repeat for repeat, unit in reversed(comparison.timed_turns(range(len(comparison.units))))}

    def decoded(who: Variant, i: int) -> Decoded:
        repeat = turns.get(unit_of[i], 0)
        output = who.outputs[repeat][i]
        seconds = round_seconds(output, who.timings[repeat][unit_of[i]].round_seconds)
        return Decoded(pieces=pieces(output, tokenizer), round_ms=[round(1e3 * s, 3) for s in seconds])

    shown = []
    for i in spread(range(len(comparison.prompts)), NUM_SAMPLES):
        prompt, output, drafted = comparison.prompts[i], variant.outputs[0][i], decoded(variant, i)
        shown.append(
            Sample(
                suite=prompt.suite,
                prompt_id=prompt.id,
                prompt=prompt.text,
                output=str(tokenizer.decode(output.tokens, clean_up_tokenization_spaces=False)),
                rounds=output.rounds,
                tau=metrics.tau([output]),
                pieces=drafted.pieces,
                round_ms=drafted.round_ms,
                plain=decoded(comparison.plain, i),
            )
        )
    return shown


def pieces(output: Output, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """Return the output token by token: its text, its round (0 is the prefill), and True if it was drafted.

    If a token ends inside a character, its text is in the piece of the token that completes the character.
    """
    rounds = [0] + [number for number, count in enumerate(output.accepted, start=1) for _ in range(count + 1)]
    detokenizer = Detokenizer(tokenizer)
    return [
        Piece(text=detokenizer.push(token), round=rounds[n], drafted=drafted)
        for n, (token, drafted) in enumerate(zip(output.tokens, output.drafted(), strict=True))
    ]
