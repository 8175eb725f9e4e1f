"""Heads on disk: what was saved comes back bit for bit or not at all, in the form that engines read."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eval.records.provenance import read_provenance
from heads.methods.eagle3 import Eagle3
from heads.saved import check_fits, check_loaders, find_head, load_head, read_config, save_head, weights_hash
from tests.support.faults import small_files
from tests.support.native_mtp import change_config, change_weights
from tests.support.refusals import refused
from tests.support.small_heads import eagle3_head

TARGET = dict(
    name="org/target", architecture="LlamaForCausalLM", fingerprint="f00d", hidden_size=16, vocab_size=40, num_layers=8,
    eos_token_id=[1, 7],
)  # fmt: skip


def make_head(**changes: Any) -> Eagle3:
    return eagle3_head(**changes).float()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(make_head(), tmp_path / "head", target=TARGET, provenance={"commit": "abc"})
    return tmp_path / "head"


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True}, {"draft_vocab_size": 40}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_comes_back_bit_for_bit(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    head = make_head(**options).to(dtype)
    save_head(head, tmp_path / "head", target=TARGET)
    assert f"torch.{json.loads((tmp_path / 'head/config.json').read_text())['torch_dtype']}" == str(dtype)
    for path in (tmp_path / "head", tmp_path):  # the head's folder, or that of its run
        again = load_head(path, dtype=dtype)
        assert again.config == head.config and not again.training
        assert again.state_dict().keys() == head.state_dict().keys()
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())
        assert torch.equal(again.draft_to_target, head.draft_to_target) and again.draft_to_target.dtype == torch.int64


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_full_disk_leaves_the_old_head(folder: Path) -> None:
    """A true short write: no file may grow past a few kilobytes."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with small_files(4096):
        said = refused(save_head, make_head(), folder, target=TARGET)
    assert "head: no space left on the device for the head" in said
    assert {path: path.read_bytes() for path in folder.iterdir()} == before and entries(folder.parent) == {"head"}


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
        assert (run / "head").is_symlink() and entries(disk) == {"kept"} and entries(run) == {"head"}


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
    assert all(reader.result()[0] > 0 for reader in found) and entries(tmp_path) == {"head"}


def test_truncated_and_damaged_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:4], b"", b"\xff" * 64):
        file.write_bytes(damaged)
        assert "truncated or damaged" in refused(load_head, folder)
    file.unlink()
    assert "no head there" in refused(load_head, folder)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("fc.weight", lambda value: None, "fc.weight"),
        ("surplus", lambda value: torch.zeros(2), "surplus"),
        ("fc.weight", lambda value: torch.zeros(16, 32), r"expected \(16, 48\) .*, found \(16, 32\)"),
        ("fc.weight", lambda value: value / 0, "fc.weight holds values that are not finite"),
        ("norm.weight", lambda value: value + 1e-3, "changed since it was saved"),
    ],
)
def test_tampered_weights(name: str, change: Callable[[Any], Tensor | None], words: str, folder: Path) -> None:
    before = load_file(folder / "model.safetensors").get(name)
    change_weights(folder, **{name.replace(".", "__"): change(before)})
    text = refused(load_head, folder)
    assert re.search(words, text) and str(folder) in text


def test_configs_that_are_not_ours_and_damaged_ones(folder: Path) -> None:
    record = read_config(folder)
    for changes in ({"rms_norm_eps": "a"}, {"surplus": 1}):
        change_config(folder, draftsmith=record | {"config": record["config"] | changes})
        text = refused(load_head, folder)
        assert str(folder) in text and f"draftsmith.config.{min(changes)}" in text
    change_config(folder, draftsmith=record | {"provenance": {"versions": {"numpy": 1e300}}})
    assert "draftsmith.provenance.versions.numpy: " in refused(read_provenance, folder)
    change_config(folder, draftsmith=record, rope_scaling=[1])
    verdicts = check_loaders(folder)
    assert any("rope_scaling: is no JSON object" in error for verdict in verdicts for error in verdict.errors)
    change_config(folder, draftsmith=record | {"target": []})
    assert "draftsmith.target: expected a JSON object" in refused(load_head, folder)
    for text, words in (
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"draftsmith": {"kind": "other"}}', "no head of a known kind"),
        ('{"draftsmith": {"kind": "eagle3", "format": 99}}', "format 99, this version reads 1"),
    ):
        (folder / "config.json").write_text(text)
        assert words in refused(load_head, folder)


def test_where_there_is_no_head(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", "word", "no/such-head"):
        assert str(path) in refused(load_head, path)


def test_a_head_fits_targets_of_the_shape_of_its_own(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another copy, such as a quantised one or a fine-tune, is said: what is measured is of that copy."""
    same = TARGET | {"name": "this-target", "dtype": torch.float32, "identity": TARGET}
    for fingerprint in ("f00d", "beef", "feed-int8"):
        identity = {"identity": TARGET | {"fingerprint": fingerprint}}
        check_fits(folder, cast(Any, SimpleNamespace(**same | identity)))
    said = [message.partition(" (")[2].partition(")")[0] for message in caplog.messages]
    assert said == [f"other weights, of fingerprint {other} for f00d" for other in ("beef", "feed")]
    for change, words in (
        ({"hidden_size": 32}, "hidden size 16, but this-target has 32"),
        ({"vocab_size": 48}, "vocabulary 40, but this-target has 48"),
        ({"num_layers": 9}, "number of layers 8, but this-target has 9"),
    ):
        assert words in refused(check_fits, folder, SimpleNamespace(**same | change))


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
