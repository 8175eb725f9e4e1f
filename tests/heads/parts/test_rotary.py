"""Rotary positions of heads are transformers' own, at the positions of long texts too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.parts.rotary import rotary_of

POSITIONS = torch.tensor([[0, 4_095, 32_767, 131_071]])
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LENGTH = {"original_max_position_embeddings": 2**17}
SHORT, LONG = ([1 + i / 16 for i in range(32)], [1.0 + i for i in range(32)])
KINDS: dict[str, tuple[float, dict[str, Any]]] = {
    "plain": (1e6, {"rope_type": "default"}),
    "llama3, of Llama 3.1": (5e5, {"rope_type": "llama3", **LLAMA3}),
    "linear, of Gemma 3": (1e6, {"rope_type": "linear", "factor": 8.0}),
    "yarn": (1e6, YARN),
    "yarn, of gpt-oss": (1.5e5, YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}),
    "yarn, of DeepSeek-V3": (1e4, YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn, of DeepSeek-V2-Lite": (1e4, YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5}),
    "yarn with a factor of attention": (1e6, YARN | {"attention_factor": 1.25}),
    # Short texts, for which transformers uses the short list, and engines both lists' factor.
    "longrope": (1e4, {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **LENGTH}),
}


@pytest.mark.parametrize(("theta", "scaling"), KINDS.values(), ids=KINDS.keys())
def test_positions_are_those_of_transformers(theta: float, scaling: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "max_position_embeddings": 2**19}
    config = LlamaConfig(**sizes, num_attention_heads=4, rope_parameters={**scaling, "rope_theta": theta})
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS)
    ours = rotary_of(SimpleNamespace(**sizes, rope_theta=theta, rope_scaling=scaling))(POSITIONS, torch.float32)
    sign = torch.tensor([-1.0, 1.0]).repeat_interleave(32)
    for made, own in zip(ours, (cos, sin * sign), strict=True):
        torch.testing.assert_close(made[:, 0], own, atol=1e-6, rtol=0)
    lengths = (ours[0] ** 2 + ours[1] ** 2).sqrt()
    is_longer = scaling["rope_type"] in ("yarn", "longrope") and scaling.get("mscale") != 1.0
    assert bool((lengths > 1.01).all()) == is_longer
