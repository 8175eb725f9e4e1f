"""Heads in other projects' forms, measured as they are by the command."""

import json
from functools import partial
from pathlib import Path

import pytest

from eval import bench
from eval.core.command_line import exit_status
from tests.support.annotations import Capture
from tests.support.published_heads import DEEPSPEC, RAW, dspark, eagle3, medusa, write


@pytest.mark.usefixtures("without_charts")
def test_published_heads_are_measured_on_a_named_target(tiny_target_dir: Path, tmp_path: Path, capsys: Capture) -> None:
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}
    raw = write(tmp_path / "raw", RAW | ids, eagle3().to_checkpoint())
    pickled = write(tmp_path / "pickled", {"medusa_num_heads": 3}, medusa().to_checkpoint(), "medusa_lm_head.pt")
    (tmp_path / "prompts.jsonl").write_text('{"text": "the sea is near"}\n{"text": "there are ten"}\n')
    options = [f"--prompts={tmp_path}/prompts.jsonl", "--max-new-tokens=8", "--repeats=1", "--tree=chain:2"]
    assert exit_status(partial(bench.main, [raw, *options])) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert raw in line and "--target" in line
    options += [f"--target={tiny_target_dir}", f"--out={tmp_path}/out"]
    assert exit_status(partial(bench.main, [pickled, *options])) == 2
    assert "medusa_lm_head.pt" in capsys.readouterr().err
    assert exit_status(partial(bench.main, [raw, *options])) == 0
    said = capsys.readouterr().err
    assert f"{raw}: vLLM" in said
    (file,) = (tmp_path / "out").rglob("results.json")
    found = json.loads(file.read_text())
    assert found["exact"]["identical"] == found["exact"]["prompts"] == 2
    assert found["head"]["kind"] == "eagle3" and found["head"]["aux_layer_ids"] == [1, 3, 6]
    origin = found["head"]["origin"]
    assert origin["form"] == "raw EAGLE-3" and origin["files"] == {"model.safetensors": found["head"]["sha256"]}
    assert origin["differs"][0] in said and origin["differs"][0] in (file.parent / "report.html").read_text()
    options[-1] = f"--out={tmp_path}/several"
    spark = write(tmp_path / "dspark", DEEPSPEC, dspark().to_checkpoint())
    heads = [raw, f"{pickled}/medusa_lm_head.pt", spark, str(tiny_target_dir), "lookup:2"]
    assert exit_status(partial(bench.main, [*heads, *options])) == 0
    (file,) = (tmp_path / "several").rglob("compare.json")
    origins = {head["kind"]: head["origin"] for head in json.loads(file.read_text())["heads"]}
    assert origins["lookup"] is None and list(origins["medusa"]["files"]) == ["medusa_lm_head.pt"]
    assert origins["dspark"]["form"] == "DSpark" and origins["draft"]["form"] == "language model"
