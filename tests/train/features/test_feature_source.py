"""Features for training are the target's own on packed documents, by products in autocast's dtype, also where several
processes share its layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from eval.runtime.engine import Engine, EngineOptions
from heads.core.contract import Rows
from heads.core.errors import UserError
from heads.targets.frozen_target import FrozenTarget
from heads.targets.layer_placement import drop_layers, shard_layers
from heads.targets.load import load_target
from tests.heads.targets.test_native_decoder import make_target
from tests.support.annotations import Patch
from tests.support.processes import finish, launcher, start
from tests.support.runs import Settings, same, weights, write_recipe
from train.features.feature_source import FeatureSource, make_batch

AUX_LAYER_IDS = (0, 2, 3)


def test_products_are_in_the_dtype_of_autocast() -> None:
    target = make_target("llama", torch.float32)
    documents = (torch.arange(30) >= 20).long().expand(2, -1)
    tokens = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(0))
    everywhere, positions = torch.ones_like(tokens, dtype=torch.bool), torch.arange(30) - 20 * documents
    rows = Rows(tokens, everywhere, positions, documents)
    plain = make_batch(target, rows, AUX_LAYER_IDS, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = make_batch(target, rows, AUX_LAYER_IDS, torch.float32)
    alone = target.alone(tokens[:, 20:])
    assert distance(plain.hidden[:, 20:], alone) < 1e-5
    assert 1e-4 < distance(narrow.hidden[:, 20:], alone) < 0.05
    assert narrow.hidden.dtype == narrow.aux_hidden_states.dtype == torch.float32
    exact, rounded = (batch.shared.lm_head(plain.hidden) for batch in (plain, narrow))
    assert 1e-4 < distance(rounded, exact) < 0.02 and rounded.dtype == torch.float32


@pytest.mark.parametrize(("room", "copies"), [(True, 1), (False, 2)])
def test_a_whole_copy_is_loaded_once_where_there_is_room(room: bool, copies: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr("train.features.feature_source.has_room", lambda _: room)
    loaded: list[FrozenTarget] = []
    without_layers = make_target("llama", torch.float32)
    without_layers.move(torch.device("cpu"), None, drop_layers)

    def load() -> FrozenTarget:
        loaded.append(make_target("llama", torch.float32))
        return loaded[-1]

    source = FeatureSource(without_layers, load)
    for _ in range(2):
        with source.whole() as target:
            assert target is loaded[-1]
    assert len(loaded) == copies


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
    for kind in ("process", "sharded"):
        finish(start(recipe, f"output_dir={tmp_path / kind}", f"features.kind={kind}", launcher=two))
        assert (tmp_path / kind / "results.json").is_file()
    assert same(*(weights(tmp_path / kind, 6) for kind in ("process", "sharded")))


def test_a_target_without_layers_decodes_nothing(tiny_target_dir: Path) -> None:
    lean, whole = (load_target(str(tiny_target_dir), place=place) for place in (drop_layers, None))
    assert lean.fingerprint == whole.fingerprint and lean.num_layers == whole.num_layers
    assert torch.equal(lean.lm_head_weight, whole.lm_head_weight)
    assert all(parameter.is_meta for parameter in lean.layers.parameters())
    with pytest.raises(UserError, match="cannot decode here: its decoder layers are absent"):
        Engine(lean, None, EngineOptions(max_length=16))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
