"""Training and measurement as on other machines, with one thread: with AVX2 only, and without a C compiler."""

import json
import os
from pathlib import Path

import pytest

from tests.support.processes import ROOT, finish, start

ONLY_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
MACHINES = {
    "avx2": (ONLY_AVX2 | {"CFLAGS": "-march=x86-64-v3"}, "torch and products in C", "no"),
    "no compiler": ({"CC": "none"}, "torch (no C compiler)", None),
}
SHORT = (
    *("data.context_length=160", "data.sources.0.limit=20", "data.regenerate.prompts=8"),
    *("data.regenerate.new_tokens=16", "train.max_steps=3", "train.warmup_steps=1", "train.eval_points=1"),
    *("eval.num_prompts=2", "eval.max_new_tokens=8", "eval.report.num_prompts=2", "eval.report.max_new_tokens=8"),
    *("eval.report.repeats=1",),
)


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="AVX2 is x86's")
@pytest.mark.parametrize("machine", MACHINES)
def test_the_quickstart_runs_on_it(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, decoder, precision = MACHINES[machine]
    for name, value in limits.items():
        monkeypatch.setenv(name, value)
    run, bench = tmp_path / "run", tmp_path / "bench"
    said = finish(start(Path("recipes/quickstart.yaml"), f"output_dir={run}", *SHORT))
    state = json.loads((run / "checkpoints/step-3/state.json").read_text())
    assert precision in (None, state["precision"])
    trains = "bf16" if state["precision"] == "bf16" else "fp32"
    setup = next(line for line in said.splitlines() if "decodes in" in line)
    assert f"1 thread: decodes in float32 by {decoder}, trains in {trains}" in setup
    options = "--num-prompts", "2", "--max-new-tokens", "8", "--out", str(bench)
    said = finish(start(run, *options, script=ROOT / "eval/bench.py"))
    assert f"1 thread: decodes in float32 by {decoder}" in said
    results = json.loads((bench / "results.json").read_text())
    assert results["decoder"] == decoder and results["exact"]["identical"] == results["exact"]["prompts"] == 2
