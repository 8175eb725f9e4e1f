"""The command that grows a target and its head, as a user types it."""

import subprocess
import sys
from pathlib import Path

import torch

from eval.grown import shape_of
from heads.checkpoint import save_head, target_record
from heads.registry import build_head
from heads.target import load_target

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/grow_target.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_target_and_head_are_grown_and_fit(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = load_target(str(tiny_target_dir))
    for kind in ("eagle3", "medusa"):
        head = build_head(kind, {}, target, torch.ones(target.vocab_size))
        save_head(head, tmp_path / kind / "head", target=target_record(target))
    out = tmp_path / "big"
    sizes = "--hidden-size 48 --num-hidden-layers 11 --num-attention-heads 12 --num-key-value-heads 3 --head-dim 12"
    done = run(
        str(tiny_target_dir),
        str(out),
        "--heads",
        *(str(tmp_path / kind) for kind in ("eagle3", "medusa")),
        *sizes.split(),
    )
    assert done.returncode == 0, done.stderr
    grown = load_target(str(out))
    assert shape_of(grown.config).hidden_size == 48 and grown.config.grown_from == target.name
    command = [sys.executable, "eval/compare.py", str(out / "eagle3"), str(out / "medusa"), "--tree", "chain:2"]
    command += ["--num-prompts", "2", "--repeats", "1", "--max-prompt-tokens", "200", "--max-new-tokens", "8"]
    measured = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, cwd=ROOT)
    assert measured.returncode == 0, measured.stderr
    assert measured.stdout.count("2 of 2") == 2 and "(grown from" in measured.stdout


def test_a_smaller_shape_is_refused_in_one_line(tiny_target_dir: Path, tmp_path: Path) -> None:
    done = run(str(tiny_target_dir), str(tmp_path / "grown"), "--hidden-size", "16")
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]  # beside libraries' own
    assert done.returncode == 2 and len(said) == 1 and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "grown").exists()


def test_a_folder_that_holds_something_is_left_as_it_is(tiny_target_dir: Path, tmp_path: Path) -> None:
    kept = tmp_path / "runs/mine/head/model.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"weeks of work")
    done = run(str(tiny_target_dir), str(tmp_path / "runs"), "--num-hidden-layers", "11")
    assert done.returncode == 2 and f"OUT {tmp_path / 'runs'}: is there already" in done.stderr, done.stderr
    assert kept.read_bytes() == b"weeks of work" and [kept] == [path for path in tmp_path.rglob("*") if path.is_file()]
