"""The command that grows a target and its head, as a user types it."""

from pathlib import Path

import pytest
import torch

from eval import bench
from eval.command import exit_status
from heads.checkpoint import save_head, target_record
from heads.registry import build_head
from heads.target.frozen import load_target
from scripts import grow_target
from scripts.grown.target import shape_of


def call(*words: object) -> int:
    return exit_status(lambda: grow_target.main([str(word) for word in words]))


def test_target_and_head_are_grown_and_fit(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(str(tiny_target_dir))
    for kind in ("eagle3", "medusa"):
        head = build_head(kind, {}, target, torch.ones(target.vocab_size))
        save_head(head, tmp_path / kind / "head", target=target_record(target))
    out = tmp_path / "big"
    sizes = "--hidden-size 48 --num-hidden-layers 11 --num-attention-heads 12 --num-key-value-heads 3 --head-dim 12"
    heads = [tmp_path / kind for kind in ("eagle3", "medusa")]
    assert call(tiny_target_dir, out, "--heads", *heads, *sizes.split()) == 0
    grown = load_target(str(out))
    assert shape_of(grown.config).hidden_size == 48 and grown.config.grown_from == target.name
    words = [out / "eagle3", out / "medusa", "--tree", "chain:2", "--out", tmp_path / "out"]
    words += ["--num-prompts", "2", "--repeats", "1", "--max-prompt-tokens", "200", "--max-new-tokens", "8"]
    assert exit_status(lambda: bench.main([str(word) for word in words])) == 0
    measured = capsys.readouterr().out
    assert measured.count("2 of 2") == 2 and "(grown from" in measured


def test_a_smaller_shape_is_refused_in_one_line(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tiny_target_dir, tmp_path / "grown", "--hidden-size", "16") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ")
    assert not (tmp_path / "grown").exists()


def test_a_folder_that_holds_something_is_left_as_it_is(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "runs/mine/head/model.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"weeks of work")
    assert call(tiny_target_dir, tmp_path / "runs", "--num-hidden-layers", "11") == 2
    assert f"OUT {tmp_path / 'runs'}: is there already" in capsys.readouterr().err
    assert kept.read_bytes() == b"weeks of work" and [kept] == [path for path in tmp_path.rglob("*") if path.is_file()]
