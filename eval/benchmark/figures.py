"""The figures of results.json: of a comparison's variants, and what identifies target, head and machine."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from eval.benchmark import metrics
from eval.benchmark.audit import audit, find_divergences
from eval.benchmark.environment import decoder_facts, device_facts, versions
from eval.benchmark.measure import Comparison, Timing, Variant, check_decoded, trace
from eval.benchmark.prompts import spread
from eval.benchmark.results import Results, finite
from eval.runtime.engine import PHASES, Output
from eval.runtime.request import Detokenizer
from heads.base import Drafter
from heads.checkpoint import weights_hash
from heads.registry import kind_of
from heads.target.frozen import FrozenTarget
from heads.target.quantization import weight_bytes

NUM_SAMPLES = 4


def figures(
    comparison: Comparison, variant: Variant, divergences: Sequence[dict[str, Any]], units: Sequence[int]
) -> Results:
    """Return the figures of one setting over some of the units (all of them, or a suite's)."""
    indices = [i for unit in units for i in comparison.units[unit]]
    chosen = {(comparison.prompts[i].suite, comparison.prompts[i].id) for i in indices}
    differing = [d for d in divergences if (d["suite"], d["prompt"]) in chosen]
    wrong, near_ties = split_near_ties(differing)
    identical = len(indices) - len({(d["suite"], d["prompt"]) for d in wrong})
    outputs = [variant.outputs[0][i] for i in indices]
    traces = [trace(output) for output in outputs]
    depth = variant.shape.depth
    in_distribution = variant.in_distribution(comparison)
    tokens, made = [comparison.tokens(unit) for unit in units], [comparison.tokens(unit, variant) for unit in units]
    plain = [comparison.plain.unit_seconds(unit) for unit in units]
    seconds = [variant.unit_seconds(unit) for unit in units]
    timings = variant.timings_of(units)
    tau = metrics.tau(traces)
    phases = comparison.breakdowns[comparison.drafting.index(variant)]
    return {
        "tree": str(variant.shape),
        "depth": depth,
        "nodes": variant.shape.nodes,
        "temperature": comparison.requests[0].sampling.temperature,
        "rule": variant.engine.options.rule,
        "exact": {
            **(
                in_distribution_record(len(indices), len(indices), identical, wrong)
                if in_distribution
                else {"prompts": len(indices), "identical": identical, "divergences": wrong}
            ),
            **near_ties,
        },
        "tau": {"mean": tau, "ci95": metrics.tau_interval(traces)},
        "alpha": metrics.acceptance_by_depth(traces, depth),
        "accepted_histogram": metrics.accepted_histogram(traces, depth),
        "baseline": {
            "tokens_per_second": metrics.tokens_per_second(tokens, plain),
            "ms_per_token": 1e3 * sum(plain) / max(sum(tokens), 1),
            "token_ms": token_percentiles(comparison.plain.timings_of(units)),
        },
        "speculative": {
            "tokens_per_second": metrics.tokens_per_second(made, seconds),
            "ms_per_round": 1e3 * sum(seconds) / max(sum(timing.rounds for timing in timings), 1),
            "token_ms": token_percentiles(timings),
            "breakdown_ms": {phase: 1e3 * phases[phase] for phase in PHASES},
            "plain_step_ms": 1e3 * phases["plain"],
        },
        "speedup": speedup_record(comparison, variant, units, tau) if identical == len(indices) else None,
        **({} if variant.engine.candidates is None else {"adaptive": adaptive_record(variant, units)}),
        "loop_share": metrics.loop_share([output.tokens for output in outputs]),
        "tokens": sum(len(output.tokens) for output in outputs),
        "undecoded": sum(len(output.tokens) == 1 for output in outputs),
    }


def speedup_record(comparison: Comparison, variant: Variant, units: Sequence[int], tau: float) -> Results:
    """Return the speedup over plain decoding of a variant over some of the units, measured and predicted."""
    plain = [comparison.plain.unit_seconds(unit) for unit in units]
    seconds = [variant.unit_seconds(unit) for unit in units]
    if variant.in_distribution(comparison):  # the texts are others than plain decoding's, so rates are compared
        made, tokens = ([comparison.tokens(unit, who) for unit in units] for who in (variant, comparison.plain))
        rates = (made, seconds), (tokens, plain)
        measured, interval = metrics.rate_ratio(*rates), metrics.rate_ratio_interval(*rates)
    else:
        measured, interval = metrics.speedup(plain, seconds), metrics.speedup_interval(plain, seconds)
    phases = comparison.breakdowns[comparison.drafting.index(variant)]
    return {
        "measured": measured,
        "ci95": interval,
        "predicted": metrics.predicted_speedup(
            tau,
            plain_seconds=phases["plain"],
            draft=phases["draft"],
            verify=phases["verify"],
            rest=phases["accept"] + phases["commit"],
        ),
    }


def token_percentiles(timings: Sequence[Timing]) -> dict[str, float]:
    """The spread of the time between tokens."""
    return metrics.token_percentiles([seconds for timing in timings for seconds in timing.token_seconds])


def adaptive_record(variant: Variant, units: Sequence[int]) -> Results:
    """Return the share of rounds of each draft, the longest first."""
    assert variant.engine.candidates is not None
    rounds = sum((timing.candidates for timing in variant.timings_of(units)), Counter())
    names = [str(shape) for shape in variant.engine.candidates.controller.shapes]
    return {"shares": {name: rounds[name] / max(rounds.total(), 1) for name in names}, "rounds": rounds.total()}


def split_near_ties(divergences: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], Results]:
    """Split divergences into faults, and a record with the near-ties, if there are any, under `near_ties`."""
    wrong = [d for d in divergences if not d.get("near_tie")]
    near = [d for d in divergences if d.get("near_tie")]
    return wrong, {"near_ties": near} if near else {}


def by_suite(comparison: Comparison, variant: Variant, divergences: Sequence[dict[str, Any]]) -> dict[str, Results]:
    """The figures of each suite, and of each category of a suite that has several, as `suite/category`."""
    groups: dict[str, list[int]] = {}
    for unit, indices in enumerate(comparison.units):
        prompt = comparison.prompts[indices[0]]
        groups.setdefault(prompt.suite, []).append(unit)
        if prompt.category != prompt.suite:
            groups.setdefault(f"{prompt.suite}/{prompt.category}", []).append(unit)
    return {name: figures(comparison, variant, divergences, units) for name, units in groups.items()}


def headline(measurements: Sequence[Results]) -> int:
    """The setting that stands for all: the fastest at the first temperature, or the first one if the audit failed."""
    candidates = [i for i, m in enumerate(measurements) if m["temperature"] == measurements[0]["temperature"]]
    if any(measurements[i]["speedup"] is None for i in candidates):
        return 0
    return max(candidates, key=lambda i: measurements[i]["speedup"]["measured"])


def pooled_exactness(measurements: Sequence[Results], unrepeatable: Sequence[dict[str, Any]]) -> Results:
    """The audit over every setting measured; plain decoding must repeat itself too."""
    prompts = sum(m["exact"]["prompts"] for m in measurements)
    divergences = [*unrepeatable, *(d for m in measurements for d in m["exact"]["divergences"])]
    compared = [m["exact"].get("greedy", m["exact"]) for m in measurements]
    identical = sum(exact["identical"] for exact in compared) - len(unrepeatable)
    record: Results = {"prompts": prompts, "identical": identical, "divergences": divergences}
    if any("kind" in m["exact"] for m in measurements):
        record = in_distribution_record(prompts, sum(exact["prompts"] for exact in compared), identical, divergences)
    near = [d for m in measurements for d in m["exact"].get("near_ties", [])]
    return {**record, "near_ties": near} if near else record


def in_distribution_record(
    prompts: int, compared: int, identical: int, divergences: Sequence[dict[str, Any]]
) -> Results:
    """`exact` where sampled texts are other draws of the target's distribution: no text is compared but those of
    temperature 0, under `greedy`."""
    greedy = {"prompts": compared, "identical": identical}
    return {
        "kind": "distribution",
        "prompts": prompts,
        "identical": None,
        "greedy": greedy,
        "divergences": list(divergences),
    }


def target_facts(target: FrozenTarget) -> Results:
    """Return the identity and the size of the target."""
    return {
        "name": target.name,
        "architecture": type(target.model).__name__,
        "fingerprint": target.fingerprint,
        "quantize": target.quantize,
        "weight_bytes": weight_bytes(target.model),
        "parameters": num_parameters(target.model),
        "layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "grown_from": getattr(target.config, "grown_from", None),
        "adapter": target.adapter,
    }


def head_facts(head: Drafter, path: str) -> Results:
    """Return the identity and the size of the head: its own weights, none if it uses the target's."""
    config: Any = getattr(head, "config", None)
    return {
        "kind": kind_of(head),
        "path": path,
        "sha256": weights_hash(path),
        "parameters": num_parameters(head) if isinstance(head, nn.Module) else 0,
        "aux_layer_ids": list(head.aux_layer_ids),
        "config": asdict(config) if is_dataclass(config) and not isinstance(config, type) else {},
    }


def environment(target: FrozenTarget) -> Results:
    """Return the time and the machine of the measurement."""
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "device": device_facts(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "decoder": decoder_facts(target),
        "versions": versions(),
    }


def samples(comparison: Comparison, variant: Variant, tokenizer: PreTrainedTokenizerBase) -> list[Results]:
    """A few prompts with their outputs, cut into tokens that know their round and whether they were drafted."""
    chosen = spread(range(len(comparison.prompts)), NUM_SAMPLES)
    return [
        {
            "suite": prompt.suite,
            "prompt_id": prompt.id,
            "prompt": prompt.text,
            "output": tokenizer.decode(output.tokens),
            "rounds": output.rounds,
            "tau": finite(metrics.tau([trace(output)])),
            "pieces": pieces(output, tokenizer),
        }
        for prompt, output in ((comparison.prompts[i], variant.outputs[0][i]) for i in chosen)
    ]


def pieces(output: Output, tokenizer: PreTrainedTokenizerBase) -> list[Results]:
    """The output token by token: text, round (0 = the prefill), drafted or the target's own.

    A token may end inside a character; its text then comes with the token that completes it.
    """
    rounds = [0] + [number for number, count in enumerate(output.accepted, start=1) for _ in range(count + 1)]
    detokenizer = Detokenizer(tokenizer)
    return [
        {"text": detokenizer.push(token), "round": rounds[n], "drafted": drafted}
        for n, (token, drafted) in enumerate(zip(output.tokens, output.drafted(), strict=True))
    ]


def num_parameters(module: nn.Module) -> int:
    """Weights, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass
class Judged:
    """The figures of comparisons, a place for each variant, and where plain decoding did not repeat itself."""

    measurements: list[Results] = field(default_factory=list)
    suites: list[dict[str, Results]] = field(default_factory=list)
    samples: list[list[Results]] = field(default_factory=list)
    unrepeatable: list[Results] = field(default_factory=list)

    def add(self, other: "Judged") -> None:
        """Take up what another comparison gave."""
        self.measurements += other.measurements
        self.suites += other.suites
        self.samples += other.samples
        self.unrepeatable += other.unrepeatable


def judge(result: Comparison, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase) -> Judged:
    """Every variant's figures, audited. UserError where no output is longer than what the prefill gives."""
    suites = ", ".join(sorted({prompt.suite for prompt in result.prompts}))
    check_decoded(result.plain.outputs[0].values(), suites)
    judged = Judged(unrepeatable=find_divergences(result, result.plain, target, tokenizer))
    for variant, divergences in zip(result.drafting, audit(result, target, tokenizer), strict=True):
        judged.measurements.append(figures(result, variant, divergences, range(len(result.units))))
        judged.suites.append(by_suite(result, variant, divergences))
        judged.samples.append(samples(result, variant, tokenizer))
    return judged


def withhold_speed(measurements: Sequence[Results]) -> None:
    """Remove every speedup, because the audit failed."""
    for measurement in measurements:
        measurement["speedup"] = None
