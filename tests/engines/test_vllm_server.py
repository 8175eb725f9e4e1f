"""A whole vLLM as the server of a training run: its answers and its hidden states are the target's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from heads.targets.layer_placement import drop_layers
from heads.targets.load import load_target
from scripts import regenerate
from tests.engines.vllm_process import NEEDS_VLLM, TARGET, vllm_server
from tests.support.annotations import Patch
from tests.support.packed_rows import packed_rows
from tests.support.runs import forget_accelerator, lines, train
from train.features.feature_settings import VllmFeatures
from train.features.vllm import ServedFeatures
from train.recipe.recipe import Train
from train.steps.accelerate_launch import make_accelerator

pytestmark = NEEDS_VLLM
LAYERS = (2, 10, 17)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A recipe of a few steps, with answers that are stored for this test alone."""
    monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", str(tmp_path / "cache"))
    forget_accelerator()
    settings = {
        "output_dir": str(tmp_path / "run"),
        "target": {"path": str(TARGET)},
        "head": {"kind": "eagle3", "depth": 3, "intermediate_size": 192, "draft_vocab_size": 2048},
        "data": {"context_length": 128, "sources": [{"kind": "python", "limit": 20}]},
        "train": dict(max_steps=20, batch_size=2, lr=1e-3, precision="fp32", checkpoint_every=20),
        "eval": dict(
            prompts="python-heldout", num_prompts=2, max_prompt_tokens=64, max_new_tokens=16, tree="chain:3"
        ),
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "recipe.yaml"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of hidden states, which also answers."""
    folder = tmp_path_factory.mktemp("server")
    streams = {"eagle_aux_hidden_state_layer_ids": [*LAYERS, 20]}
    extract: dict[str, Any] = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    connector = {"kv_connector": "HiddenStatesConnector", "kv_connector_module_path": "hidden_states_connector"}
    states = {"shared_storage_path": str(folder / "states")}
    given = connector | {"kv_role": "kv_producer", "kv_connector_extra_config": states}
    options = ["--speculative-config", json.dumps(extract | {"draft_model_config": {"hf_config": streams}})]
    options += ["--kv-transfer-config", json.dumps(given), "--no-enable-prefix-caching"]
    with vllm_server(folder, *options) as url:
        yield url


def test_states_of_a_whole_vllm_are_the_targets_and_train_a_head(recipe: Path, url: str, tmp_path: Path) -> None:
    whole = load_target(str(TARGET), dtype=torch.float32)
    lean = load_target(str(TARGET), dtype=torch.float32, place=drop_layers)
    accelerator = make_accelerator(Train(max_steps=1, precision="fp32"))
    source = ServedFeatures(lean, VllmFeatures(kind="vllm", url=url), 2, accelerator)
    rows = packed_rows()
    given = rows.tokens, rows.positions, rows.documents, LAYERS
    theirs, own, kept = lean.packed_features(*given), whole.packed_features(*given), rows.documents >= 0
    client, text = source.open_server(LAYERS), rows.tokens[1, :31]
    said, hidden = client.log_probabilities(text), own.hidden[1, :30]
    source.close()
    ours = whole.lm_head(hidden).log_softmax(-1).gather(-1, text[1:, None])[:, 0]
    torch.testing.assert_close(said, ours, rtol=1e-4, atol=1e-4)
    for found, expected in (
        *zip(theirs.aux_hidden_states[kept].chunk(3, -1), own.aux_hidden_states[kept].chunk(3, -1), strict=True),
        (theirs.hidden[kept], own.hidden[kept]),
    ):
        assert float((found - expected).norm() / expected.norm()) < 1e-4
    train(recipe, f"features={{kind: vllm, url: {url}}}")
    train(recipe, f"output_dir={tmp_path}/own")
    served, alone = ([line["loss"] for line in lines(tmp_path / name, "train")] for name in ("run", "own"))
    assert served == pytest.approx(alone, rel=1e-3)


def test_its_answers_are_the_targets_and_train(recipe: Path, url: str, tmp_path: Path, monkeypatch: Patch) -> None:
    asked, server = "data.regenerate={prompts: 32, prompt_tokens: 64, new_tokens: 32}", f"{{url: {url}}}"
    answers: list[list[str]] = []
    for place in ("{engine: vllm}", "null", server):
        monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", str(tmp_path / f"answers-{len(answers)}"))
        assert regenerate.main([str(recipe), asked, f"data.regenerate.server={place}"]) == 0
        answers.append((tmp_path / "run/answers.jsonl").read_text().splitlines())
        forget_accelerator()
    assert len(answers[0]) == 32 and answers[0] == answers[1] == answers[2]
    train(recipe, asked, f"data.regenerate.server={server}")
    assert lines(tmp_path / "run", "eval")[-1]["tau"] > 1
