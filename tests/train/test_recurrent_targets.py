"""Heads trained on hybrid targets: one document a row, chains alone, and the target's own output at the end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.runtime.engine import Request
from eval.runtime.sampling import Sampling
from heads.core.errors import UserError
from heads.registry import build_head
from heads.saved import load_head
from heads.targets.load import load_target, load_tokenizer
from tests.runs import Settings, WriteRecipe, audit, measured_run, the_error
from tests.small_targets import make_hybrid
from train.entry import attempt

BLOCK = {"aux_layer_ids": [1, 2, 3], "num_layers": 2, "intermediate_size": 64, "mask_token_id": 128}
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle3", "depth": 3, "aux_layer_ids": [1, 2, 3], "intermediate_size": 64},
    "dflash": BLOCK | {"kind": "dflash", "block_size": 4},
    "dflash2": BLOCK | {"kind": "dflash2", "block_size": 4, "selector_rank": 8},
    "dspark": BLOCK | {"kind": "dspark", "block_size": 3, "markov_rank": 8},
}


@pytest.fixture
def hybrid_settings(settings: Settings, tmp_path: Path, tiny_target_dir: Path) -> Settings:
    """A recipe on a tiny Qwen3-Next."""
    folder = tmp_path / "hybrid"
    model = make_hybrid("qwen3_next", vocab_size=129, eos_token_id=1, tie_word_embeddings=False).model
    with torch.no_grad():
        model.get_output_embeddings().weight[128] = 0  # the mask of blocks, which no text has
    model.save_pretrained(folder)
    load_tokenizer(str(tiny_target_dir)).save_pretrained(folder)
    measured = settings["eval"] | {"tree": "chain:3", "report": {"repeats": 1, "temperatures": [0.0, 1.0]}}
    return settings | {"target": {"path": str(folder)}, "head": HEADS["eagle"], "eval": measured}


@pytest.mark.slow
@pytest.mark.parametrize("entry", HEADS)
def test_a_head_learns_and_its_output_is_the_targets_own(
    entry: str, hybrid_settings: Settings, write_recipe: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hybrid_settings["data"]["regenerate"] = {"prompts": 16, "prompt_tokens": 6, "new_tokens": 40}
    hybrid_settings["train"] |= {"max_steps": 150, "batch_size": 8, "checkpoint_every": 50}
    hybrid_settings["eval"]["max_new_tokens"] = 40  # drafts are held in bfloat16: a near-tie may fall the other way
    hybrid_settings["head"] = HEADS[entry]
    folder, _ = measured_run(entry, hybrid_settings, write_recipe)
    assert capsys.readouterr().err.count("one document a row") == 1
    measured = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    estimates = [(line["tau"], line["tau_by_training_step"]) for line in measured if "tau_by_training_step" in line]
    assert estimates and all(ours == pytest.approx(runtime, rel=0.05) for runtime, ours in estimates)
    target = load_target(hybrid_settings["target"]["path"], dtype=torch.float32)
    prompts = [[5 + 7 * n % 90, *range(40, 41 + n)] for n in range(9)]
    requests = [Request(ids, 20, Sampling(float(n % 2), seed=n), ignore_eos=True) for n, ids in enumerate(prompts)]
    audit(target, load_head(folder / "head"), requests, ["chain:1", "chain:3"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tree": "tree:3x2x6"}, "every branch of the tree tree:3x2x6 would need its own; use a chain"),
        ({"report": {"trees": ["chain:2", "tree:2x2x5"]}}, "every branch of the tree tree:2x2x5 would need its own"),
    ],
)
def test_trees_are_refused_before_training(
    change: dict[str, Any],
    words: str,
    hybrid_settings: Settings,
    write_recipe: WriteRecipe,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hybrid_settings["eval"] |= change
    assert attempt("eagle", [str(write_recipe(hybrid_settings))]) == 2
    assert words in the_error(capsys)
    assert not (Path(hybrid_settings["output_dir"]) / "metrics.jsonl").is_file()


def test_a_draft_with_recurrent_layers_is_refused() -> None:
    target = make_hybrid("qwen3_5_text")
    with pytest.raises(UserError, match="head: a qwen3_5_text has recurrent layers"):
        build_head("draft", {"layers": [0, 2]}, target, torch.ones(target.vocab_size, dtype=torch.int64))
