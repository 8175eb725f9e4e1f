"""acceptance.json: a head's measured acceptance, for whoever plans or simulates its serving.

It is named and shaped as the open proposal NVIDIA/Model-Optimizer#2247 (speculation_profile.json, schema 1.0, read in
September 2026) says; `proposal`, `measurements` and `best_num_speculative_tokens` are keys of ours. Rates are of all
rounds, the last round of an answer included, so that a mean length is 1 plus the sum of its marginal rates.
"""

import json
import shlex
from itertools import accumulate, pairwise
from typing import Any

from eval.measure.folders import short_name
from eval.measure.schema import Measurement, Results, Settings
from eval.measure.speedup_checks import headline_index, why_unreliable

ACCEPTANCE = "acceptance.json"
METHODS = {"draft": "draft_model"}
"""The proposal's names of methods that have another name here."""


def acceptance_profile(results: Results) -> dict[str, Any] | None:
    """Return the contents of acceptance.json, or None if no chain was measured or the audit failed. Block verification
    has no rates by position, so under it there is no profile."""
    chains = [m for m in results.measurements if m.nodes == m.depth + 1 and m.rule != "block"]
    if not chains or results.exact.divergences:
        return None
    best, head, settings = chains[headline_index(chains)], results.head, results.settings
    method, rates = METHODS.get(head.kind, head.kind), rates_of(best)
    implied = 1 + sum(rates["marginal_accept_rates"])
    at_best = [m for m in chains if conditions(m, settings) == conditions(best, settings)]
    # All but block kinds draft the beginning of their longer draft as a shorter one: one K tells of all smaller ones.
    block_size = head.config.block_size
    by_category = {name: rates_of(suite) for name, suite in best.suites.items()}
    return {
        "schema_version": "1.0",
        "proposal": "NVIDIA/Model-Optimizer#2247",
        "measured": True,
        "method": method,
        "draft_checkpoint": {"name": short_name(head.path), "sha256": head.sha256},
        "target_model": {"name": short_name(results.target.name), "fingerprint": results.target.fingerprint},
        "num_speculative_tokens": best.depth,
        "best_num_speculative_tokens": best.depth if why_unreliable(best) is None else None,
        "block_size": block_size,
        "max_supported_k": max(m.depth for m in chains),
        "verification_method": "longest_prefix",
        **rates,
        "accept_length_model": "chain_analytic" if block_size is None else "measured_per_k",
        "accept_length_by_k": {str(m.depth): m.tau.mean for m in at_best},
        "per_category": by_category if best == results.headline else None,
        "measurement_conditions": {
            "dataset": ",".join(map(short_name, settings.suites)),
            "prompts_hash": settings.prompts_hash,
            "num_samples": settings.num_prompts,
            "osl": settings.max_new_tokens,
            "temperature": best.temperature,
            **{"top_k": settings.top_k, "top_p": settings.top_p, "min_p": settings.min_p},
            "rule": best.rule,
            "concurrency": best.batch_size or settings.batch_size,
            "engine": f"draftsmith {results.versions.get('draftsmith')}",
            "device": results.device.name,
            "dtype": results.dtype,
            "measured_at": results.measured_at,
        },
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": implied,
                "reported_mean_accept_length": best.tau.mean,
                "passed": abs(implied - best.tau.mean) <= 0.02,
            }
        },
        "measurements": [{"num_speculative_tokens": m.depth} | conditions(m, settings) | rates_of(m) for m in chains],
    }


def conditions(m: Measurement, settings: Settings) -> dict[str, Any]:
    """Return what, beside K, changes the lengths of a measurement."""
    batch_size = m.batch_size or settings.batch_size
    return {"temperature": m.temperature, "rule": m.rule, "batch_size": batch_size, "context": m.context}


def rates_of(m: Measurement) -> dict[str, Any]:
    reached = list(accumulate(reversed(m.accepted_histogram)))[::-1]  # by depth, from 0: rounds that accepted so many
    return {
        "conditional_accept_rates": [round(n / before, 6) if before else 0.0 for before, n in pairwise(reached)],
        "marginal_accept_rates": [round(n / max(reached[0], 1), 6) for n in reached[1:]],
        "mean_accept_length": m.tau.mean,
        "mean_accept_length_per_request": m.tau.per_request,
        "acceptance_length_histogram": {str(n): count for n, count in enumerate(m.accepted_histogram, start=1)},
    }


def load_test(profile: dict[str, Any], target: str) -> str:
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
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(settings))}"
