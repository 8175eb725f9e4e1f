"""The dtype of products is what this processor, with the instructions its libraries may use, is fast in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONLY_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="AVX2 is x86's")
@pytest.mark.parametrize("limits", [ONLY_AVX2, {"ATEN_CPU_CAPABILITY": "default"}], ids=["AVX2", "torch alone limited"])
def test_without_bfloat16_instructions_products_are_in_float32(limits: dict[str, str]) -> None:
    code = "import torch; from train.fast_dtype import fastest_dtype; print(fastest_dtype(torch.device('cpu')))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **limits, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "torch.float32"
