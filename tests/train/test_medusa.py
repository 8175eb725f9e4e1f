"""Medusa trained on a tiny target: what is saved drafts, and every output is the target's own."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eval.runtime.engine import Request, Sampling
from heads.core.errors import UserError
from heads.saved import load_head
from heads.targets.load import load_target
from tests.runs import Settings, WriteRecipe, audit, measured_run, train_in


@pytest.fixture
def small(settings: Settings) -> Settings:
    """A run of Medusa heads that takes a second."""
    settings["head"] = {"kind": "medusa", "depth": 3, "tree_nodes": 8, "draft_vocab_size": 64}
    settings["train"] |= {"max_steps": 4, "log_every": 1, "checkpoint_every": 10}
    settings["eval"] |= {"tree": "head", "report": {"repeats": 1, "trees": ["head", "chain:3"]}}
    return settings


def test_a_run_leaves_heads_that_engines_read_and_their_tree(small: Settings, write_recipe: WriteRecipe) -> None:
    folder, results = measured_run("medusa", small, write_recipe)
    config = json.loads((folder / "head/config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"], config["truncated_vocab_size"]) == (3, 1, 64)
    assert config["medusa_fc_bias"] is True and config["architectures"] == ["MedusaModel"]
    weights = load_file(folder / "head/medusa_lm_head.safetensors")
    names = {f"{i}.0.linear.{part}" for i in range(3) for part in ("weight", "bias")}
    assert weights.keys() == names | {f"{i}.1.weight" for i in range(3)} | {"token_map"}
    assert weights["token_map"].shape == (64,) and weights["2.1.weight"].shape == (64, 32)
    head = load_head(folder)
    assert head.tree == tuple(map(tuple, config["draftsmith"]["config"]["tree"])) and len(head.tree) == 7
    assert [m["tree"] for m in results["measurements"]] == ["head", "chain:3"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_output_is_the_targets_own(
    temperature: float, small: Settings, write_recipe: WriteRecipe, tiny_target_dir: Path
) -> None:
    small["head"]["num_layers"] = 2
    small["train"] |= {"lr": 0.02, "max_steps": 20, "log_every": 20}
    head, target = load_head(measured_run("medusa", small, write_recipe)[0]), load_target(str(tiny_target_dir))
    requests = [Request([5 + n, 40, 41 + n % 3], 24, Sampling(temperature, seed=n)) for n in range(8)]
    audit(target, head, requests, ["chain:2", "chain:3", "static:3.2.1", "tree:3x3x10", "head"])


def test_a_tree_of_its_own_is_asked_of_heads_that_grow_one(small: Settings, write_recipe: WriteRecipe) -> None:
    small["head"]["tree_nodes"] = 0
    small["eval"]["tree"] = "chain:3"
    with pytest.raises(UserError, match="grow no static tree"):
        train_in(small, write_recipe)
