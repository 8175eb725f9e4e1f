"""What transformers 5.24 leaves out of a GGUF file is read, or the file is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen2Config, Starcoder2Config

from heads.targets.gguf_settings import complete
from tests.support.refusals import refused

CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    gguf = pytest.importorskip("gguf")

    def write(family: str, keys: dict[str, Any], tensor: str = "output_norm.weight", factor: int = 1) -> Path:
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", family)
        for key, value in keys.items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{family}.{key}", value)
        writer.add_tensor(tensor, np.full(4, factor, np.float32))
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize(
    ("config", "family", "keys", "found"),
    [
        (Starcoder2Config(), "starcoder2", {"rope.freq_base": 1e6}, {"rope_theta": 1e6}),
        (Phi3Config(), "phi3", {"attention.sliding_window": 2047}, {"sliding_window": 2047}),
        (Gemma2Config(), "gemma2", CAPS, CAPS),
        (Qwen2Config(use_sliding_window=False), "qwen2", {"attention.sliding_window": 9}, {"sliding_window": None}),
        (LlamaConfig(), "llama", {"rope.scaling.type": "none"}, {"rope_theta": 1e4}),
    ],
)
def test_settings_are_those_of_the_file(write: Any, config: Any, family: str, keys: Any, found: Any) -> None:
    complete(config, write(family, keys))
    assert {name: getattr(config, name, config.rope_parameters.get(name)) for name in found} == found


def test_each_kind_of_attention_has_its_own_rotary_base(write: Any) -> None:
    config: Any = Gemma3TextConfig()
    complete(config, write("gemma3", {"rope.freq_base": 2e6, "rope.freq_base_swa": 3e4}))
    assert {kind: rotary["rope_theta"] for kind, rotary in config.rope_parameters.items()} == {
        "sliding_attention": 3e4,
        "full_attention": 2e6,
    }


def test_scaled_rotary_positions_are_refused_unless_they_were_read(write: Any) -> None:
    complete(LlamaConfig(), write("llama", {}, "rope_freqs.weight"))
    factors = write("llama", {}, "rope_freqs.weight", 8)
    assert "positions (rope_freqs.weight)" in refused(complete, LlamaConfig(), factors)
    linear = write("gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert "positions (rope.scaling.type linear)" in refused(complete, Gemma3TextConfig(), linear)
    scaled = write("llama", {"rope.scaling.type": "yarn"})
    assert "positions (rope.scaling.type yarn)" in refused(complete, LlamaConfig(), scaled)
    complete(LlamaConfig(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), scaled)
