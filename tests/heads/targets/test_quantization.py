"""A target in int8: smaller, near the whole one, known by its fingerprint, and refused where it would not be so."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from heads.targets.quantization import weight_bytes
from tests.heads.targets.test_frozen_target import make_model
from tests.support.refusals import refused
from tests.support.small_targets import make_target


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = dict(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_key_value_heads=4
    )
    make_target("llama", torch.float32, **sizes, initializer_range=0.02).model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.25), (torch.bfloat16, 0.5)])
def test_layers_shrink_and_stay_near(dtype: torch.dtype, share: float, llama_dir: Path) -> None:
    pytest.importorskip("torchao")
    whole, small = (load_target(str(llama_dir), dtype=dtype, quantize=how) for how in (None, "int8"))
    # Beside the int8 matrices stand a scale a row and the norms, one 64th to one 128th of a matrix each.
    assert share < weight_bytes(small.layers) / weight_bytes(whole.layers) < 1.15 * share
    less = weight_bytes(whole.layers) - weight_bytes(small.layers)
    assert weight_bytes(whole.model) - weight_bytes(small.model) == less
    assert small.dtype == whole.dtype == dtype and small.fingerprint == f"{whole.fingerprint}-int8"
    assert torch.equal(small.lm_head_weight, whole.lm_head_weight)
    tokens = torch.arange(24)[None] * 5 % 64
    positions, one = torch.arange(24)[None], torch.zeros(1, 24, dtype=torch.int64)
    true, found = (target.packed_features(tokens, positions, one, [1, 3]) for target in (whole, small))
    for a, b in ((true.hidden, found.hidden), (true.aux_hidden_states, found.aux_hidden_states)):
        assert 0 < (a - b).norm() / a.norm() < 0.02  # rounding to 255 steps of the largest entry of a row


def test_a_row_depends_on_no_other(llama_dir: Path) -> None:
    """Not even on an input a million times larger, which would set the scale of whatever rounds inputs together."""
    pytest.importorskip("torchao")
    layer: Any = load_target(str(llama_dir), quantize="int8").layers[0]
    x = torch.randn(5, 64)
    alone = layer.mlp.up_proj(x)
    x[1:] *= 1e6
    torch.testing.assert_close(layer.mlp.up_proj(x)[0], alone[0], rtol=0, atol=0)


def test_layers_that_are_not_linear_are_refused() -> None:
    pytest.importorskip("torchao")
    said = refused(FrozenTarget, make_model("gpt2"), "its path", quantize="int8")
    assert said.startswith("its path: target.quantize ") and "hold 0% of its layers' weights" in said


def test_without_torchao_it_says_what_to_install(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)  # its import fails, as that of an absent package
    assert "pip install -e '.[quant]'" in refused(load_target, str(llama_dir), quantize="int8")
