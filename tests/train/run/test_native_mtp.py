"""The whole way of a target's own module: measured as it is, tuned, audited, stitched, loaded by transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eval import bench
from eval.core.command_line import exit_status
from scripts import stitch
from tests.conftest import make_tiny_tokenizer
from tests.support.native_mtp import make_multimodal, shard, write_native
from tests.support.runs import Settings, write_recipe
from train.entry import attempt

SHORT = ["--num-prompts", "2", "--max-new-tokens", "8"]


def measure(head: Path, out: Path, target: Path) -> dict[str, Any]:
    options = [str(head), "--target", str(target), "--tree", "chain:3", "--prompts", str(out.parent / "prompts.jsonl")]
    assert exit_status(lambda: bench.main([*options, *SHORT, "--repeats", "1", "--out", str(out)])) == 0
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["glm", "hybrid", "multimodal"])
def test_the_whole_way(form: str, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = tmp_path / "target", tmp_path / "stitched"
    write_native(target, "hybrid_fused" if form == "multimodal" else form, dtype=torch.bfloat16)
    if form == "multimodal":
        make_multimodal(target)
    shard(target)
    make_tiny_tokenizer().save_pretrained(target)
    (tmp_path / "prompts.jsonl").write_text('{"text": "the sea is near"}\n{"text": "there are ten"}\n')
    as_it_is = measure(target, tmp_path / "before", target)
    assert as_it_is["exact"]["identical"] == as_it_is["exact"]["prompts"] > 0
    assert ("recycles the state before shared_head.norm" in capsys.readouterr().err) == (form == "glm")

    settings["target"]["path"] = str(target)
    settings["head"] = {"kind": "mtp", "native": True}
    settings["train"] |= {"max_steps": 2, "log_every": 1, "lr": 1e-2}
    settings["eval"]["report"] = {"repeats": 1, "tree": ["chain:3"], "temperature": [0, 1]}
    assert attempt("mtp", [str(write_recipe(settings))]) == 0
    run = Path(settings["output_dir"])
    prompts = ["--prompts", str(tmp_path / "prompts.jsonl"), "--tree", "chain:1,chain:3"]
    assert exit_status(lambda: bench.main([str(run), "--no-timing", *prompts, *SHORT])) == 0

    assert exit_status(lambda: stitch.main([str(run), str(target), str(out)])) == 0
    tuned = measure(run, tmp_path / "tuned", target)
    stitched = measure(out, tmp_path / "after", out)
    for name in ("tau", "accepted_histogram", "exact"):
        assert stitched[name] == tuned[name], name
    assert stitched["target"]["fingerprint"] == as_it_is["target"]["fingerprint"]
    saved = load_file(run / "head/model.safetensors")
    assert {str(value.dtype) for name, value in saved.items() if "correction_bias" not in name} == {"torch.bfloat16"}
    auto: Any = AutoModelForCausalLM
    prompt = torch.tensor([[5, 9, 77, 3]])
    first, second = (
        auto.from_pretrained(path).generate(prompt, max_new_tokens=8, do_sample=False) for path in (target, out)
    )
    assert torch.equal(first, second)
