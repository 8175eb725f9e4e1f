"""Whole engines beside this runtime: the same texts, rounds and accepted draft tokens, and what makes them differ."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import parity
from eval.servers.engine_process import engine_python
from eval.servers.llamacpp import check_gguf, convert
from heads.registry import build_head
from heads.saved import load_head, save_head, target_record
from heads.targets.load import load_target
from tests.support.refusals import refused

pytestmark = pytest.mark.engine
TARGET = Path(__file__).parents[2] / "recipes/quickstart/target"
SMALL: dict[str, Any] = {"num_layers": 2, "intermediate_size": 192}
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 2048, "intermediate_size": 384},
    "eagle3, norm_output": {"norm_output": True, "intermediate_size": 384},
    "dflash": SMALL | {"block_size": 6},
    "dspark": SMALL | {"block_size": 5, "markov_rank": 64},
    "dflash2": SMALL | {"block_size": 6, "selector_top_k": 13, "selector_rank": 64},
    "draft": {"layers": [0, 5, 10, 15, 19]},
}
"""New heads: their initial weights draft a few right tokens."""


@pytest.fixture(scope="module")
def heads(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    def make(folder: Path) -> None:
        target = load_target(str(TARGET), dtype=torch.float32)
        for name, settings in HEADS.items():
            head = build_head(name.partition(",")[0], settings, target, torch.ones(target.vocab_size))
            save_head(head, folder / name, target=target_record(target), dtype=torch.float32)

    return once("engine-heads", make)


def answer(heads: Path, name: str, engine: str, out: Path, *options: str) -> str:
    """Return the last line of a comparison, whose exit status says whether all is equal."""
    if engine_python(engine) is None:
        pytest.skip(f"no environment with {engine} (scripts/make_engine.sh {engine})")
    words = [str(heads / name), "--target", str(TARGET), "--engine", engine, "--out", str(out), *options]
    status = parity.main([*words, "--num-prompts", "4", "--max-new-tokens", "32"])
    record = json.loads((out / "parity.json").read_text())
    assert (status == 0) is record["equal"] and (out / "parity.md").is_file()
    return str(record["answer"])


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("llama.cpp", name) for name in HEADS if "," not in name),
        ("openvino", "eagle3"),
        ("openvino", "dflash"),
        ("mlx", "draft"),
        ("vllm", "eagle3"),
        ("vllm", "draft"),
    ],
)
def test_a_whole_engine_writes_our_texts_and_accepts_our_drafts(
    engine: str, name: str, heads: Path, tmp_path: Path
) -> None:
    assert re.match(r"the head: (the same texts, )?tau 1\.[01]", answer(heads, name, engine, tmp_path))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("eagle3, norm_output", [], "the conversion: norm_output was dropped"),
        ("eagle3", ["--engine-cache", "q4_0"], "its KV cache is in 4 bits"),
        ("eagle3", ["--engine-cache", "q8_0"], "its KV cache is in 8 bits"),
        ("eagle3", ["--engine-target", "q8_0"], "its target's weights are Q8_0"),
    ],
)
def test_what_makes_llama_cpp_differ_is_named(
    name: str, options: list[str], reason: str, heads: Path, tmp_path: Path
) -> None:
    if engine_python("llama.cpp") is None:
        pytest.skip("no environment with llama.cpp (scripts/make_engine.sh llama.cpp)")
    if options[:1] == ["--engine-target"]:
        file = tmp_path / "target.gguf"
        convert(str(TARGET), file, dtype=options[1], log=tmp_path / "log")
        options = ["--engine-target", str(file)]
    assert reason in answer(heads, name, "llama.cpp", tmp_path / "out", *options)


def test_a_gguf_file_is_read_back_whole(heads: Path, tmp_path: Path) -> None:
    if engine_python("llama.cpp") is None:
        pytest.skip("no environment with llama.cpp (scripts/make_engine.sh llama.cpp)")
    head, file = load_head(heads / "eagle3"), tmp_path / "eagle3-head.gguf"
    assert not convert(str(heads / "eagle3"), file, target=str(TARGET), log=tmp_path / "log")  # an unknown tokenizer
    check_gguf(file, head, "eagle3")
    other = load_head(heads / "eagle3, norm_output")
    assert "values of the head" in refused(check_gguf, file, other, "eagle3")
    head.aux_layer_ids = (1, 2, 3)
    assert "target_layers: the converter wrote [2, 10, 17]" in refused(check_gguf, file, head, "eagle3")
    fault = refused(convert, str(heads / "eagle3"), file, log=tmp_path / "log")
    assert "llama.cpp's converter refuses it" in fault and "--target-model-dir" in fault
