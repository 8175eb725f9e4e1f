"""Training from a head that is there already."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heads.saved import load_head
from tests.support.closeness import assert_close
from tests.support.published_heads import RAW, ZLAB, dflash, eagle3, write
from tests.support.runs import Settings, train, train_in, write_recipe
from train.recipe.recipe import load_recipe


@pytest.fixture
def small(settings: Settings, tmp_path: Path) -> Settings:
    """A run of two steps from a published EAGLE-3 head."""
    path = write(tmp_path / "published", RAW, eagle3().to_checkpoint())
    settings["head"] = {"kind": "eagle3", "depth": 2, "init_from": path}
    settings["train"] |= {"max_steps": 2, "log_every": 1, "lr": 1e-6}
    return settings


def test_a_run_from_a_published_head_and_one_from_that_run(small: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train_in(small)
    recipe = load_recipe(folder / "recipe.yaml")
    assert recipe.head.init_from == small["head"]["init_from"]
    assert (recipe.head.draft_vocab_size, recipe.head.intermediate_size, recipe.head.depth) == (48, 40, 2)
    start, head = eagle3(), load_head(folder)
    saved = load_file(folder / "checkpoints/step-2/head.safetensors")
    for name, value in start.state_dict().items():
        assert_close(saved[name], value, roundings=256)
    assert not torch.equal(saved["fc.weight"], start.fc.weight) and torch.equal(
        head.draft_to_target, start.draft_to_target
    )
    train(folder / "recipe.yaml", f"output_dir={folder.parent / 'again'}")
    from_run = f"output_dir={folder.parent / 'from-run'}", f"head.init_from={folder}"
    train(write_recipe(small), *from_run)
    assert "newest checkpoint" not in capsys.readouterr().err
    (folder / "checkpoints/step-2").rename(folder / "checkpoints/step-7")
    head_folder = f"{folder}/head"
    train(write_recipe(small), f"output_dir={folder.parent / 'from-best'}", f"head.init_from={head_folder}")
    said = f"head.init_from: {head_folder}: its head is of step 2, its newest checkpoint of step 7"
    assert said in capsys.readouterr().err


def test_a_run_from_a_head_of_another_kind_says_what_it_took(
    small: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "dflash", ZLAB, dflash().to_checkpoint())
    small["head"] = {"kind": "xpress", "init_from": path, "num_anchors": 8}
    small["eval"] |= {"tree": "chain:3"}
    folder = train_in(small)
    said = capsys.readouterr().err
    assert f"head.init_from: {path} holds a dflash; taken: fc, hidden_norm, layers.*.input_layernorm, " in said
    assert "norm; new: xpress_head; left out: none" in said
    saved = load_file(folder / "checkpoints/step-2/head.safetensors")
    assert_close(saved["fc.weight"], dflash().fc.weight, roundings=256)
