"""Modules put into a copy of the target's checkpoint: what is not theirs stays byte for byte, and theirs draft."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.core.command_line import exit_status
from heads.methods.mtp_names import SHARED
from heads.published import read_published, start_from
from heads.registry import build_head
from heads.saved import load_head, save_head, target_record
from heads.stitch import ADDED, ONLY, stitch
from heads.targets.hub import INDEX, read_tensors, tensor_files
from heads.targets.load import load_target
from scripts.stitch import main
from tests.support import refusals
from tests.support.native_mtp import V, change_config, change_weights, make_multimodal, shard, write_native

FORMS: dict[str, tuple[str, list[Callable[[Path], None]]]] = {
    "mimo": ("mimo", []),
    "deepseek": ("deepseek", [shard]),
    "glm": ("glm", [shard]),
    "multimodal": ("qwen_fused", [make_multimodal, shard]),
}
LAYER = "model.layers.3."


def make(tmp_path: Path, form: str) -> tuple[Path, Path, Any]:
    """A target of the form named, and a head tuned for it: the folders of both, and the head."""
    family, changes = FORMS[form]
    write_native(tmp_path / "target", family, dtype=torch.bfloat16)
    for change in changes:
        change(tmp_path / "target")
    (tmp_path / "target/tokenizer.json").write_text("{}")
    (tmp_path / "target/extra").mkdir()
    (tmp_path / "target/extra/notes.txt").write_text("kept")
    model = load_target(str(tmp_path / "target"))
    head = build_head("mtp", {"native": True}, model, torch.ones(V))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    save_head(head, tmp_path / "head", target=target_record(model))
    return tmp_path / "target", tmp_path / "head", load_head(tmp_path / "head")


def raw(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    """Each tensor of a checkpoint by its dtype and bytes."""
    files = tensor_files(str(folder))
    found = read_tensors(files, files)
    return {name: (value.dtype, value.flatten().view(torch.uint8).numpy().tobytes()) for name, value in found.items()}


def drafts_equal(folder: Path, head: Any) -> None:
    found = read_published(str(folder), load_target(str(folder))).state_dict()
    assert found.keys() == head.state_dict().keys()
    assert all(torch.equal(value, found[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("form", FORMS)
def test_only_the_modules_tensors_differ(form: str, tmp_path: Path) -> None:
    target, folder, head = make(tmp_path, form)
    (tmp_path / ".out.tmp/left").mkdir(parents=True)  # by a command that was killed
    assert exit_status(lambda: main([str(folder), str(target), str(tmp_path / "out")])) == 0
    before, after, modules = raw(target), raw(tmp_path / "out"), head.to_checkpoint()
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {
        name for name in modules if not name.endswith("correction_bias")
    }
    assert all(before[name][0] == after[name][0] for name in before)
    lie = {file.name for name, file in tensor_files(str(target)).items() if name in modules}
    for path in (path for path in target.rglob("*") if path.is_file()):
        copy = tmp_path / "out" / path.relative_to(target)
        assert (path.read_bytes() == copy.read_bytes()) == (path.name not in lie), path
    assert len(list(target.rglob("*"))) == len(list((tmp_path / "out").rglob("*")))
    assert {path.name for path in tmp_path.iterdir()} == {"target", "head", "out"}
    drafts_equal(tmp_path / "out", head)


@pytest.mark.parametrize("form", ["mimo", "multimodal"])
def test_a_fine_tune_that_lost_its_modules_gets_a_file_of_them(form: str, tmp_path: Path) -> None:
    family, changes = FORMS[form]
    field = "mtp_num_hidden_layers" if family == "qwen_fused" else "num_nextn_predict_layers"
    base, target, folder = (tmp_path / name for name in ("base", "target", "head"))
    native = write_native(base, family, dtype=torch.bfloat16)
    shutil.copytree(base, target)
    lost = [*native, *(f"{LAYER}{name}" for name in SHARED)]
    change_weights(target, model__norm__weight=torch.ones(32), **dict.fromkeys(lost))
    none: dict[str, Any] = {field: 0}
    change_config(target, **none)
    for change in changes:
        change(target)
    model = load_target(str(target))
    head = start_from(str(base), "mtp", {}, model, torch.ones(model.vocab_size))
    save_head(head, folder, target=target_record(model))
    assert stitch(str(folder), str(target), tmp_path / "out") == [ADDED, INDEX, "config.json"]
    before, after = raw(target), raw(tmp_path / "out")
    assert after.keys() == before.keys() | native.keys() and all(after[name] == before[name] for name in before)
    assert all(after[name] == raw(base)[name] for name in native)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(len(data) for _, data in after.values())}
    assert index["weight_map"] == {name: file.name for name, file in tensor_files(str(tmp_path / "out")).items()}
    assert {file for name, file in index["weight_map"].items() if name in native} == {ADDED}
    assert (tmp_path / "out" / ONLY).is_file() == (changes == [])
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.get("text_config", config)[field] == 1
    drafts_equal(tmp_path / "out", head)
    auto: Any = AutoModelForCausalLM
    copy = auto.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, copy[name]) for name, value in auto.from_pretrained(target).state_dict().items())


def refused(tmp_path: Path, head: Path, target: Path, out: str = "out") -> str:
    """The one line of a refusal that writes nothing."""
    before = sorted(tmp_path.rglob("*"))
    said = refusals.refused(stitch, str(head), str(target), tmp_path / out)
    assert sorted(tmp_path.rglob("*")) == before
    return said


def test_bad_folders_and_heads_are_named(tmp_path: Path) -> None:
    target, folder, _ = make(tmp_path, "mimo")
    assert "there is something already" in refused(tmp_path, folder, target, "head")
    for place in ("nowhere", "x" * 300, "head/config.json"):
        assert "no such folder" in refused(tmp_path, folder, tmp_path / place)
    write_native(tmp_path / "glm", "glm")
    assert "trained for target" in refused(tmp_path, folder, tmp_path / "glm")
    model = load_target(str(target))
    for kind, settings, words in (
        ("medusa", {"depth": 2}, "only modules of multi-token prediction"),
        ("mtp", {}, "k_proj.bias: expected (16,), found none"),
        ("mtp", {"num_modules": 2}, "holds 2 modules"),
    ):
        head = build_head(kind, settings, model, torch.ones(V))
        save_head(head, tmp_path / "bad", target=target_record(model))
        assert words in refused(tmp_path, tmp_path / "bad", target)
    change_weights(target, model__mtp_layers__0__mlp__up_proj__weight=torch.zeros(32, 48))
    assert "up_proj.weight: expected (32, 48), found (48, 32)" in refused(tmp_path, folder, target)


def test_a_family_without_modules_is_named(tiny_target_dir: Path, tmp_path: Path) -> None:
    model = load_target(str(tiny_target_dir))
    head = build_head("mtp", {}, model, torch.ones(model.vocab_size))
    save_head(head, tmp_path / "head", target=target_record(model))
    assert "no engine loads one of a LlamaForCausalLM" in refused(tmp_path, tmp_path / "head", tiny_target_dir)
