"""The acceptance profile agrees with the results that it is made of."""

from typing import Any

from eval.records.acceptance_profile import acceptance_profile, load_test
from eval.records.schema import Results


def test_the_profile_says_the_acceptance_of_the_best_chain(results: dict[str, Any]) -> None:
    chain = results["measurements"][0]
    assert (chain["tree"], chain["temperature"]) == ("chain:2", 0.0)
    chain["accepted_histogram"] = [40, 30, 30]
    chain["tau"] |= {"mean": 1.9}
    profile = acceptance_profile(Results.model_validate(results))
    assert profile is not None and (profile["num_speculative_tokens"], profile["mean_accept_length"]) == (2, 1.9)
    assert profile["marginal_accept_rates"] == [0.6, 0.3] and profile["conditional_accept_rates"] == [0.6, 0.5]
    assert profile["measurement_conditions"]["prompts_hash"] == results["settings"]["prompts_hash"]
    assert [m["temperature"] for m in profile["measurements"]] == [0.0, 1.0]  # the trees are none of it
    assert {(m["concurrency"], m["context"]) for m in profile["measurements"]} == {(1, None)}
    target = Results.model_validate(results).target.model_copy(update={"name": "org/target", "overrides": {"min_p": 0}})
    command = load_test(profile, target)
    assert '"synthetic_acceptance_rates": [0.6, 0.3]' in command
    assert """vllm serve org/target --override-generation-config '{"min_p": 0}'""" in command


def test_trees_and_block_verification_have_no_profile(results: dict[str, Any]) -> None:
    measured = Results.model_validate(results)
    for m in measured.measurements:
        m.rule = m.rule if m.tree.startswith("tree") else "block"
    assert acceptance_profile(measured) is None
