"""The first session on a card, at small size on a CPU: the three commands write one file, and every fact holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs")
def test_every_fact_holds_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    out = tmp_path / "out.json"
    for command in ("facts", "texts", "speed"):
        words = [sys.executable, "scripts/gpu_check.py", command, "--small", "--out", str(out)]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert {"tree_attention", "logits", "choose"} == {name.split(",")[0] for name in record["facts"]["found"]}
    assert {name.split(",")[0] for name in record["texts"]["found"]} == {"llama", "gemma3_text"}
    assert all(fact["kernels"] for fact in record["texts"]["found"].values())
    speed = record["speed"]["found"]
    assert "failed" not in speed["generate, dynamic cache"] and speed["plain"]["ms"] > 0
