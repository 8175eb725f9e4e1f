"""A target whose layers two processes share: the same features, half of the weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from eval.runtime.engine import Engine, EngineOptions
from heads.core.errors import UserError
from heads.targets.layer_placement import drop_layers
from heads.targets.load import load_target
from tests.support.packed_rows import packed_rows
from tests.support.processes import finish, launcher, start
from tests.support.runs import Settings, write_recipe
from train.recipe.recipe import Target
from train.run.open_run import sharding
from train.steps.accelerate_launch import load_recipe_target

ROOT = Path(__file__).resolve().parents[3]
WORLD = 2
AUX_LAYER_IDS = (2, 4, 8)


def work(rank: int, port: str, path: str, out: Path) -> None:
    """Write the features and the share of the layers of one of two processes that share a target."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    accelerator = Accelerator(cpu=True)
    place = sharding(accelerator)
    target, _ = load_recipe_target(Target(path=path, dtype="float32"), accelerator, place=place)
    rows = packed_rows()
    found = target.packed_features(rows.tokens, rows.positions, rows.documents, AUX_LAYER_IDS)
    save_file({"aux": found.aux_hidden_states, "hidden": found.hidden}, out / f"features-{rank}.safetensors")
    layers: list[Any] = list(target.layers.parameters())
    facts = {
        "share": sum(part.to_local().numel() for part in layers) / sum(part.numel() for part in layers),
        "fingerprint": target.fingerprint,
    }
    (out / f"facts-{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_a_target(tmp_path: Path, tiny_target_dir: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.train.features.test_sharded"]
    arguments = ["29731", str(tiny_target_dir), str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(rank), *arguments], env=environment, cwd=ROOT) for rank in range(WORLD)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    whole, rows = load_target(str(tiny_target_dir), dtype=torch.float32), packed_rows()
    own = whole.packed_features(rows.tokens, rows.positions, rows.documents, AUX_LAYER_IDS)
    for rank in range(WORLD):
        found = load_file(tmp_path / f"features-{rank}.safetensors")
        assert torch.equal(found["aux"], own.aux_hidden_states) and torch.equal(found["hidden"], own.hidden)
        facts = json.loads((tmp_path / f"facts-{rank}.json").read_text())
        assert facts["share"] <= 0.55 and facts["fingerprint"] == whole.fingerprint, facts


@pytest.mark.slow
def test_sharded_training_is_training(settings: Settings, tmp_path: Path) -> None:
    settings["head"] = {"kind": "eagle3", "depth": 2}
    recipe, two = write_recipe(settings), launcher("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    runs: dict[str, Any] = {}
    for kind in ("process", "sharded"):
        finish(start(recipe, f"output_dir={tmp_path / kind}", f"features.kind={kind}", launcher=two))
        runs[kind] = load_file(tmp_path / kind / "checkpoints/step-6/head.safetensors")
        assert (tmp_path / kind / "results.json").is_file()
    assert all(torch.equal(tensor, runs["process"][name]) for name, tensor in runs["sharded"].items())


def test_a_target_without_layers_decodes_nothing(tiny_target_dir: Path) -> None:
    lean = load_target(str(tiny_target_dir), dtype=torch.float32, place=drop_layers)
    whole = load_target(str(tiny_target_dir), dtype=torch.float32)
    assert lean.fingerprint == whole.fingerprint and lean.num_layers == whole.num_layers
    assert torch.equal(lean.lm_head_weight, whole.lm_head_weight)
    assert all(parameter.is_meta for parameter in lean.layers.parameters())
    with pytest.raises(UserError, match="cannot decode here: its decoder layers are absent"):
        Engine(lean, None, EngineOptions(max_length=16))


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
