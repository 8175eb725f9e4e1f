"""A target whose layers two processes share: the same features, half of the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from eval.runtime.engine import Engine, EngineOptions
from heads.core.errors import UserError
from heads.targets.layer_placement import drop_layers, shard_layers
from heads.targets.load import load_target
from tests.support.processes import finish, launcher, start
from tests.support.runs import Settings, write_recipe


def test_each_of_two_processes_keeps_half_of_the_layers(tiny_target_dir: Path) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    whole = load_target(str(tiny_target_dir))
    target = load_target(str(tiny_target_dir), place=lambda target, _, dtype: shard_layers(target, mesh, dtype))
    dist.destroy_process_group()
    layers: list[Any] = list(target.layers.parameters())
    assert sum(part.to_local().numel() for part in layers) <= 0.55 * sum(part.numel() for part in layers)
    assert target.fingerprint == whole.fingerprint


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
