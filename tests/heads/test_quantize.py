"""Heads in 8 bits: what engines read, and what the runtime makes of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.core.engines import ENGINES, LLAMACPP
from heads.formats.quantized import PROJECTIONS, quantized
from heads.quantize import quantize_head
from heads.saved import check_loaders, load_head
from tests.support.refusals import refused

STEP = {"fp8": 2.0**-4, "int8": 1 / 127 / 2}
"""Largest error: of a value in fp8, which has three bits after the first; of a row's largest value in int8."""


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize(("kind", "settings"), [("eagle3", {"draft_vocab_size": 100}), ("draft", {"layers": [0, 5]})])
def test_projections_are_saved_in_8_bits_with_the_scales_of_their_rows(
    kind: str, settings: dict[str, Any], dtype: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    path, out = saved(kind, **settings), tmp_path / "out"
    (path / "acceptance.json").write_text("{}")  # was not measured of the copy
    before, after = quantize_head(str(path), out, dtype)
    assert after < before and not (out / "acceptance.json").exists()
    weights, made = load_file(path / "model.safetensors"), load_file(out / "model.safetensors")
    again = load_head(out).to_checkpoint()
    assert again.keys() == weights.keys()
    for name, weight in weights.items():
        if not name.endswith(PROJECTIONS):
            assert torch.equal(made[name], weight) and torch.equal(again[name], weight)
            continue
        assert made[name].itemsize == 1 and made[f"{name}_scale"].shape == (len(weight), 1)
        largest = weight.abs().amax(1, keepdim=True)
        bound = largest * STEP[dtype] if dtype == "int8" else weight.abs() * STEP[dtype] + largest * 2.0**-10 / 448
        assert ((again[name] - weight).abs() <= bound * 1.001).all()
    assert {verdict.reader for verdict in check_loaders(out) if verdict.serves} == {*ENGINES, LLAMACPP}
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["format"] == {"fp8": "float-quantized", "int8": "int-quantized"}[dtype]


def test_what_is_not_quantised(saved: Callable[..., Path], tmp_path: Path) -> None:
    path, medusa, out = str(saved("eagle3")), str(saved("medusa")), tmp_path / "out"
    assert "there is something already" in refused(quantize_head, path, tmp_path, "int8")
    quantize_head(path, out, "int8")
    assert "is quantised already" in refused(quantize_head, str(out), tmp_path / "more", "int8")
    assert "kind medusa" in refused(quantize_head, medusa, tmp_path / "more", "int8")
    assert "h.0.attn.c_attn.weight: layers with" in refused(quantized, {"h.0.attn.c_attn.weight": torch.eye(2)}, "fp8")
    assert not (tmp_path / "more").exists()
