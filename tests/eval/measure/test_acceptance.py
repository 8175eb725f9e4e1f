"""The acceptance profile agrees with the results that it is made of."""

import copy
from typing import Any

from eval.measure.acceptance import acceptance_profile, load_test
from eval.measure.schema import Results


def profile_of(results: dict[str, Any]) -> dict[str, Any] | None:
    return acceptance_profile(Results.model_validate(copy.deepcopy(results)))


def test_the_profile_says_the_acceptance_of_the_best_chain(results: dict[str, Any]) -> None:
    chain = results["measurements"][0]
    assert (chain["tree"], chain["temperature"]) == ("chain:2", 0.0)
    chain["accepted_histogram"] = [40, 30, 30]
    chain["tau"] |= {"mean": 1.9, "per_request": 1.8}
    profile = profile_of(results)
    assert profile is not None
    assert profile["marginal_accept_rates"] == [0.6, 0.3] and profile["conditional_accept_rates"] == [0.6, 0.5]
    assert (profile["mean_accept_length"], profile["mean_accept_length_per_request"]) == (1.9, 1.8)
    assert profile["acceptance_length_histogram"] == {"1": 40, "2": 30, "3": 30}
    assert profile["accept_length_by_k"] == {"2": 1.9} and profile["validation"]["mean_consistency"]["passed"]
    assert profile["measurement_conditions"]["prompts_hash"] == results["settings"]["prompts_hash"]
    assert [m["temperature"] for m in profile["measurements"]] == [0.0, 1.0]  # the trees are none of it
    assert {(m["batch_size"], m["context"]) for m in profile["measurements"]} == {(1, None)}
    at_batch_8 = chain | {"batch_size": 8, "tau": chain["tau"] | {"mean": 1.7}}
    several = profile_of(results | {"measurements": [*results["measurements"], at_batch_8]})
    assert several is not None and several["accept_length_by_k"] == {"2": 1.9}
    block = profile_of(results | {"head": results["head"] | {"config": {"block_size": 8}}})
    assert block is not None and block["accept_length_model"] == "measured_per_k"
    assert profile["accept_length_model"] == "chain_analytic"
    assert '"synthetic_acceptance_rates": [0.6, 0.3]' in load_test(profile, "org/target")


def test_trees_and_block_verification_have_no_profile(results: dict[str, Any]) -> None:
    measured = Results.model_validate(results)
    for m in measured.measurements:
        m.rule = m.rule if m.tree.startswith("tree") else "block"
    assert acceptance_profile(measured) is None
