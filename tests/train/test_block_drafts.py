"""DFlash and DSpark trained on a tiny target: what is saved drafts, and every output is the target's own."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eval.runtime.engine import Request, Sampling
from heads.saved import load_head
from heads.targets.load import load_target
from tests.runs import Settings, WriteRecipe, audit, measured_run, same, the_error, train_in, weights
from train.entry import attempt

KINDS = ("dflash", "dflash2", "dspark")


@pytest.fixture
def small(settings: Settings) -> Settings:
    """A run that takes a second; `head.kind` is missing."""
    settings["head"] = {"block_size": 4, "num_layers": 2, "num_anchors": 8, "mask_token_id": 5}
    settings["train"] |= {"max_steps": 4, "log_every": 1, "checkpoint_every": 2}
    settings["eval"] |= {"tree": "chain:3", "report": {"repeats": 1, "trees": ["chain:3", "chain:2"]}}
    return settings


def of_kind(settings: Settings, kind: str) -> Settings:
    more = {"dflash": {}, "dflash2": {"selector_rank": 8}, "dspark": {"markov_rank": 8}}
    return settings | {"head": {"kind": kind, **settings["head"], **more[kind]}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_a_head_that_engines_read(kind: str, small: Settings, write_recipe: WriteRecipe) -> None:
    folder, results = measured_run(kind, of_kind(small, kind), write_recipe)
    config = json.loads((folder / "head/config.json").read_text())
    own = config if kind == "dspark" else config["dflash_config"]
    assert (own["mask_token_id"], own["target_layer_ids"]) == (5, [1, 5])
    assert load_file(folder / "head/model.safetensors").keys() == load_head(folder).state_dict().keys()
    assert [found["tree"] for found in results["measurements"]] == ["chain:3", "chain:2"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_every_output_is_the_targets_own(
    kind: str, temperature: float, small: Settings, write_recipe: WriteRecipe, tiny_target_dir: Path
) -> None:
    small["data"]["regenerate"] = {"prompts": 16, "prompt_tokens": 8, "new_tokens": 40}
    small["train"] |= {"lr": 0.01, "max_steps": 40, "log_every": 40, "checkpoint_every": 40}
    small["eval"]["report"]["trees"] = ["chain:3"]
    folder, _ = measured_run(kind, of_kind(small, kind), write_recipe)
    head, target = load_head(folder), load_target(str(tiny_target_dir))
    requests = [
        Request([5 + n, 40, 41 + n % 3, *range(50, 50 + n)], 24, Sampling(temperature, seed=n)) for n in range(8)
    ]
    trees = ["chain:3", "chain:2", "tree:3x3x10", "static:3.2.1"]
    audit(target, head, requests, trees)


@pytest.mark.parametrize(("kind", "changes"), [("dflash", {"weights": "d_pace"}), ("dflash2", {}), ("dspark", {})])
def test_a_resumed_run_goes_on_bit_for_bit(
    kind: str, changes: Settings, small: Settings, write_recipe: WriteRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    small = of_kind(small, kind)
    small["head"] |= changes
    small["train"]["grad_accum"] = 2
    whole = train_in(small, write_recipe)
    first = weights(whole, 4)
    shutil.rmtree(whole / "checkpoints/step-4")  # so that the second run goes on from step 2
    train_in(small, write_recipe)
    assert "resumed from" in capsys.readouterr().err
    assert same(weights(whole, 4), first)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask_token_id": 71}, "head.mask_token_id: the data has the token 71, 'b'"),
        ({"mask_token_id": 128}, "head.mask_token_id: expected an id below 128"),
        ({"block_size": 600}, "head.block_size: expected no more than the target's context of 512, got 600"),
        ({"block_size": 60}, "data.context_length: 48 tokens cannot hold a root and a draft of 59"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    changes: Settings, said: str, small: Settings, write_recipe: WriteRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = of_kind(small, "dflash")
    settings["head"] |= changes
    assert attempt("dflash", [str(write_recipe(settings))]) == 2
    assert said in the_error(capsys)


@pytest.mark.parametrize("report", [False, True])
def test_a_tree_deeper_than_the_block_is_refused_before_training(
    report: bool, small: Settings, write_recipe: WriteRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = of_kind(small, "dflash")
    if report:
        settings["eval"]["report"]["trees"] = ["chain:3", "chain:4"]
    else:
        settings["eval"]["tree"] = "chain:4"
    assert attempt("dflash", [str(write_recipe(settings))]) == 2
    assert "tree chain:4: 4 levels, the head drafts 3 in a block of 4; ask for no more" in the_error(capsys)
    assert not list(Path(settings["output_dir"]).rglob("metrics.jsonl"))
