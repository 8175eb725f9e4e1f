"""A folder of features: what it holds, what it refuses, and training from it."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from heads.core.errors import UserError
from scripts.cache_features import main as fill
from tests.conftest import small_recipe
from tests.support.annotations import Patch
from tests.support.refusals import refused
from tests.support.runs import Settings, forget_accelerator, same, train_in, weights, write_recipe
from train.features.cached import Shard, check_holds, decode, encode


def caching(settings: Settings, tmp_path: Path, dtype: str = "float32") -> Settings:
    """A recipe of an EAGLE-3 head, whose start needs features too, that reads a folder."""
    return settings | {
        "output_dir": str(tmp_path / "from-cache"),
        "head": {"kind": "eagle3", "depth": 2, "fc_norm": True},
        "features": {"kind": "cache", "folder": str(tmp_path / "features"), "dtype": dtype},
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Settings:
    """A recipe whose folder of features is filled."""
    folder = tmp_path_factory.mktemp("cached")
    cached = caching(small_recipe(folder, tiny_target_dir), folder)
    forget_accelerator()
    assert fill([str(write_recipe(cached))]) == 0
    return cached


@pytest.fixture
def filled(made: Settings, tmp_path: Path) -> Settings:
    """The same with a copy of the folder, to spoil."""
    shutil.copytree(made["features"]["folder"], tmp_path / "features")
    return caching(made, tmp_path)


def shard_of(settings: Settings) -> Path:
    return Path(settings["features"]["folder"]) / "rows-00000.safetensors"


def test_training_from_a_folder_is_training(filled: Settings, settings: Settings) -> None:
    cached = train_in(filled)
    own = train_in(settings | {"head": filled["head"]})
    assert same(weights(cached, 6), weights(own, 6))
    shutil.rmtree(cached / "checkpoints/step-6")
    assert same(weights(train_in(filled), 6), weights(own, 6))


def test_a_folder_serves_heads_that_read_fewer_layers(filled: Settings, settings: Settings, capfd: Any) -> None:
    fewer = {"head": filled["head"] | {"aux_layer_ids": [4]}}
    assert fill([str(write_recipe(filled | fewer))]) == 0 and "filled already" in capfd.readouterr().err
    found = weights(train_in(filled | fewer), 6)
    assert same(found, weights(train_in(settings | fewer), 6))
    filled |= {"head": {"kind": "eagle3", "aux_layer_ids": [1, 2]}, "output_dir": filled["output_dir"] + "-other"}
    assert "aux_layer_ids: holds [2, 4, 5], expected [1, 2]; fill another" in refused(train_in, filled)


def test_fp8_is_within_its_bound() -> None:
    torch.manual_seed(0)
    streams = torch.randn(64, 3, 32) * torch.logspace(-20, 20, 64)[:, None, None]
    streams[5] = 0
    stored = encode(streams, "fp8")
    assert stored["values"].dtype == torch.float8_e4m3fn and stored["scales"].shape == (64, 3)
    apart = (decode(**stored) - streams).abs()
    # Half a unit of three bits, or half of the smallest step below them.
    assert (apart <= streams.abs() * 2.0**-4 + stored["scales"][..., None] * 2.0**-10).all()


def test_narrow_features_train(settings: Settings, tmp_path: Path) -> None:
    cached = caching(settings, tmp_path, "fp8")
    fill([str(write_recipe(cached))])
    found = weights(train_in(cached), 6)
    own = weights(train_in(settings | {"head": cached["head"]}), 6)
    apart = [float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in own.items() if tensor.dim() == 2]
    assert 0 < max(apart) < 0.3


def test_an_interrupted_filling_goes_on(filled: Settings, monkeypatch: Patch) -> None:
    """Of shards of one row each: here the second one of three is missing."""
    folder = Path(filled["features"]["folder"])
    shutil.rmtree(folder)
    monkeypatch.setattr("train.features.cached.SHARD_BYTES", 1)
    fill([str(write_recipe(filled))])
    shards = sorted(folder.iterdir())
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards}
    assert len(shards) > 2
    shards[1].unlink()
    fewer = filled | {"head": filled["head"] | {"aux_layer_ids": [4]}}
    assert "aux_layer_ids: holds [2, 4, 5], expected [4]; fill another" in refused(fill, [str(write_recipe(fewer))])
    fill([str(write_recipe(filled))])
    after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.iterdir())}
    assert [name for name in before if after[name] != before[name]] == [shards[1].name]
    assert same(load(after[shards[1].name][0]), load(before[shards[1].name][0]))  # the order in the header varies


def test_every_difference_is_refused(filled: Settings) -> None:
    folder = Path(filled["features"]["folder"])
    about = Shard(shard_of(filled)).about
    names = {"format", "target", "aux_layer_ids", "dtype", "precision", "row_length", "data"}
    assert about.keys() == names | {"settings"}
    edited = about | {"settings": about["settings"] | {"rms_norm_eps": 0.1}}
    assert re.search(r"rms_norm_eps was .*, is its default; fill", refused(check_holds, folder, edited, about))
    check_holds(folder, {key: about[key] for key in names}, about)  # of an earlier version
    for key in names:
        with pytest.raises(UserError, match=rf"features\.folder .*: {key}: holds 'x', expected .*; fill another"):
            check_holds(folder, about | {key: "x"}, about)
    filled["data"] = filled["data"] | {"context_length": 16}
    assert "row_length: holds" in refused(train_in, filled)


def describe_anew(shard: Path, **metadata: str) -> None:
    save_file(load(shard.read_bytes()), shard, metadata)


def of_another_target(shard: Path) -> None:
    describe_anew(shard, total="9", about=json.dumps(Shard(shard).about | {"target": "x"}))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Path.unlink, "is not filled; run python scripts/cache_features"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-100]), "is damaged .* delete it and run"),
        (lambda shard: describe_anew(shard, format="pt"), "is damaged .* delete it and run"),
        (of_another_target, "target: holds"),
    ],
)
def test_damage_is_named(fault: Any, words: str, filled: Settings) -> None:
    fault(shard_of(filled))
    with pytest.raises(UserError, match=words):
        train_in(filled)


def test_a_disk_without_room_is_refused_first(settings: Settings, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("train.features.cached.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"needs .* GB, its disk has .* GB; free some space"):
        fill([str(write_recipe(caching(settings, tmp_path)))])
    assert not list((tmp_path / "features").glob("rows-*"))
