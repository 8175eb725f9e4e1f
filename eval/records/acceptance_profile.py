"""acceptance.json: a head's measured acceptance, for whoever plans or simulates its serving.

Its keys are those of the open proposal NVIDIA/Model-Optimizer#2247 (speculation_profile.json, schema 1.0, read in
September 2026), except `proposal` and `measurements`. Rates are of all rounds, the last round of an answer included, so
that a mean length is 1 plus the sum of its marginal rates.
"""

from itertools import accumulate, pairwise
from typing import Any

from eval.records.figures_schema import Measurement
from eval.records.result_folders import short_name
from eval.records.schema import Results, Target
from eval.records.speedup_checks import headline_index
from heads.core.serve_commands import Setting, vllm_serve

ACCEPTANCE = "acceptance.json"


def acceptance_profile(results: Results) -> dict[str, Any] | None:
    """Return the contents of acceptance.json, or None if no chain was measured or the audit failed. Block verification
    has no rates by position, so under it there is no profile."""
    chains = [
        m
        for m in results.measurements
        if m.nodes == m.depth + 1 == len(m.accepted_histogram) and m.rule != "block"  # no drafts of several lengths
    ]
    if not chains or results.exact.divergences:
        return None
    head = results.head
    target = results.target
    settings = results.settings
    measurements = [
        {
            "num_speculative_tokens": m.depth,
            "temperature": m.temperature,
            "rule": m.rule,
            "concurrency": m.batch_size or settings.batch_size,
            "context": m.context,
            **rates_of(m),
        }
        for m in chains
    ]
    return {
        "schema_version": "1.0",
        "proposal": "NVIDIA/Model-Optimizer#2247",
        "method": "draft_model" if head.kind == "draft" else head.kind,
        "draft_checkpoint": {"name": short_name(head.path), "sha256": head.sha256},
        "target_model": {"name": short_name(target.name), "fingerprint": target.fingerprint},
        **measurements[headline_index(chains)],
        "measurement_conditions": {
            "dataset": ",".join(map(short_name, settings.suites)),
            "prompts_hash": settings.prompts_hash,
            "num_samples": settings.num_prompts,
            "osl": settings.max_new_tokens,
            **settings.shared(),
            "device": results.device.name,
            "dtype": results.dtype,
            "measured_at": results.measured_at,
        },
        "measurements": measurements,
    }


def rates_of(m: Measurement) -> dict[str, object]:
    reached = list(accumulate(reversed(m.accepted_histogram)))[::-1]  # by depth, from 0: rounds that accepted so many
    return {
        "conditional_accept_rates": [round(n / before, 6) if before else 0.0 for before, n in pairwise(reached)],
        "marginal_accept_rates": [round(n / max(reached[0], 1), 6) for n in reached[1:]],
        "mean_accept_length": m.tau.mean,
    }


def load_test(profile: dict[str, Any], target: Target) -> str:
    """Return the command with which vLLM 0.33 accepts draft tokens of prompt lookup at the head's rates, without the
    head. Rounds in which the lookup finds no draft accept none, so that these rates are the most."""
    settings = {
        "method": "ngram",
        "num_speculative_tokens": profile["num_speculative_tokens"],
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(rate, 3) for rate in profile["marginal_accept_rates"]],
    }
    return vllm_serve(Setting(target=target.name, template=target.template, overrides=target.overrides), settings)
