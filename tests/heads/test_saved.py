"""Heads on disk: what was saved comes back bit for bit or not at all, in the form that engines read."""

import dataclasses
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.core.errors import UserError
from heads.methods.eagle3 import Eagle3, Eagle3Config
from heads.methods.vocab import build_vocab
from heads.saved import (
    check_fits,
    find_head,
    load_head,
    read_config,
    save_head,
    weights_hash,
)
from tests.faults import small_files
from tests.heads.small_heads import SIZES
from tests.refusals import refused

CONFIG = Eagle3Config(
    **SIZES | dict(num_target_layers=12, aux_layer_ids=(2, 6, 9), num_key_value_heads=1, rope_theta=5e5)
)
TARGET = {
    "name": "org/target",
    "architecture": "LlamaForCausalLM",
    "fingerprint": "f00d",
    "hidden_size": 16,
    "vocab_size": 40,
    "num_layers": 12,
    "eos_token_id": [1, 7],
}


def make_head(**changes: Any) -> Eagle3:
    config = dataclasses.replace(CONFIG, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Eagle3(config, build_vocab(torch.randint(0, 9, (config.vocab_size,)), config.draft_vocab_size))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(make_head(), tmp_path / "head", target=TARGET, provenance={"commit": "abc"})
    return tmp_path / "head"


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True}, {"draft_vocab_size": 40}])
def test_a_head_comes_back_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    head = make_head(**options)
    save_head(head, tmp_path / "head", target=TARGET)
    for path in (tmp_path / "head", tmp_path):  # the head's folder, or that of its run
        again = load_head(path)
        assert again.config == head.config and not again.training
        assert again.state_dict().keys() == head.state_dict().keys()
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())
        assert torch.equal(again.kept, head.kept)


def test_a_head_in_bfloat16_says_so_and_comes_back(tmp_path: Path) -> None:
    head = make_head().to(torch.bfloat16)
    save_head(head, tmp_path / "head", target=TARGET)
    assert json.loads((tmp_path / "head/config.json").read_text())["torch_dtype"] == "bfloat16"
    again = load_head(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(head.lm_head.weight, again.lm_head.weight) and again.kept.dtype == torch.int64


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()}


def test_a_full_disk_leaves_the_old_head(folder: Path) -> None:
    """A true short write: no file may grow past a few kilobytes."""
    before = contents(folder)
    with small_files(4096), pytest.raises(UserError, match="head: no space left on the device for the head"):
        save_head(make_head(), folder, target=TARGET)
    assert contents(folder) == before and entries(folder) == {"head"}


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_head_behind_a_symbolic_link_is_saved_where_it_leads(folder: Path) -> None:
    """A user keeps heads on another disk."""
    disk, run = folder.parent / "disk", folder.parent / "run"
    disk.mkdir()
    run.mkdir()
    folder.rename(disk / "kept")
    (run / "head").symlink_to("../disk/kept")
    for option in (True, False, True):
        save_head(make_head(fc_norm=option), run / "head", target=TARGET)
        assert load_head(run).config.fc_norm is load_head(disk / "kept").config.fc_norm is option
        assert (run / "head").is_symlink() and {path.name for path in disk.iterdir()} == {"kept"}
        assert {path.name for path in run.iterdir()} == {"head"}


def read_until(path: Path, stop: Event) -> tuple[int, list[str]]:
    """Read a head again and again: how often, and what went wrong."""
    count, faults = 0, []
    while not stop.is_set():
        try:
            head, record = load_head(path), read_config(find_head(path))
            marks = {float(value.flatten()[0]) for name, value in head.state_dict().items() if name.endswith("weight")}
            if len(marks) != 1 or record["provenance"]["mark"] < marks.pop():
                faults.append("weights of two saves in one head, or a record older than the weights before it")
            weights_hash(path)
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")
        count += 1
    return count, faults


@pytest.mark.parametrize("saves", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_readers_beside_a_writer_always_find_a_whole_head(saves: int, tmp_path: Path) -> None:
    stop, head = Event(), make_head()

    def save(mark: int) -> None:
        for name, value in head.state_dict().items():
            if name.endswith("weight"):
                value.fill_(mark)
        save_head(head, tmp_path / "head", target=TARGET, provenance={"mark": mark})

    save(0)
    with ThreadPoolExecutor(3) as readers:
        found = [readers.submit(read_until, tmp_path, stop) for _ in range(3)]
        try:
            for mark in range(1, saves + 1):
                save(mark)
        finally:
            stop.set()
    assert [reader.result()[1] for reader in found] == [[], [], []]
    assert all(reader.result()[0] > 0 for reader in found) and entries(tmp_path / "head") == {"head"}


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_truncated_and_damaged_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:4], b"", b"\xff" * 64):
        file.write_bytes(damaged)
        assert "truncated or damaged" in refused(load_head, folder)
    file.unlink()
    assert "no head there" in refused(load_head, folder)


def set_nan(weights: dict[str, Tensor]) -> None:
    weights["fc.weight"][3, 4] = torch.nan


def nudge(weights: dict[str, Tensor]) -> None:
    weights["norm.weight"][3] += 1e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("fc.weight"), "fc.weight"),
        (lambda w: w.update(surplus=torch.zeros(2)), "surplus"),
        (lambda w: w.update({"fc.weight": torch.zeros(16, 32)}), r"expected \(16, 48\) .*, found \(16, 32\)"),
        (set_nan, "fc.weight holds values that are not finite"),
        (nudge, "changed since it was saved"),
    ],
)
def test_tampered_weights(change: Callable[[dict[str, Tensor]], object], words: str, folder: Path) -> None:
    change_weights(folder, change)
    text = refused(load_head, folder)
    assert re.search(words, text) and str(folder) in text


def set_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["draftsmith"].update(changes)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("text", ["{", "[]", '{"draftsmith": {"kind": "other"}}'])
def test_configs_that_are_not_ours(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(load_head, folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 99}, "format"),
        ({"provenance": None}, ""),
        ({"config": dataclasses.asdict(CONFIG) | {"rms_norm_eps": "a"}}, ""),
        ({"config": dataclasses.asdict(CONFIG) | {"surplus": 1}}, ""),
        ({"target": TARGET | {"hidden_size": "16"}}, "draftsmith.target.hidden_size"),
    ],
)
def test_damaged_records(changes: dict[str, Any], words: str, folder: Path) -> None:
    set_config(folder, **changes)
    text = refused(load_head, folder)
    assert str(folder) in text and words in text


def test_where_there_is_no_head(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", "word", "no/such-head"):
        assert str(path) in refused(load_head, path)


def fake_target(**changes: Any) -> Any:
    facts = {"name": "this-target", "hidden_size": 16, "vocab_size": 40, "num_layers": 12, "fingerprint": "f00d"}
    return SimpleNamespace(**{**facts, "dtype": torch.float32, **changes})


def test_a_head_fits_its_own_target_only(folder: Path) -> None:
    check_fits(folder, fake_target(name="the same elsewhere"))
    for change, words in (
        ({"hidden_size": 32}, "hidden size 16, but this-target has 32"),
        ({"vocab_size": 48}, "vocabulary 40, but this-target has 48"),
        ({"num_layers": 8}, "number of layers 12, but this-target has 8"),
        ({"fingerprint": "beef"}, "fingerprint of the weights f00d, but this-target has beef"),
    ):
        assert words in refused(check_fits, folder, fake_target(**change))


def test_a_pickle_is_never_read(folder: Path) -> None:
    """A file that would run code when unpickled, under every name that something might look for."""
    ran = folder.parent / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (ran,))

    for name in ("model.safetensors", "pytorch_model.bin", "model.pt"):
        torch.save({"fc.weight": Evil()}, folder / name)
    refused(load_head, folder)
    (folder / "model.safetensors").unlink()
    refused(load_head, folder)
    assert not ran.exists()
