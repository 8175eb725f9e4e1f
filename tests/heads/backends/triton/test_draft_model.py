"""Draft models draft by the kernels of a GPU, in Triton's interpreter, what they draft by torch's operations."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.gpu.draft_models import model_drafts_are_those_of_torch
from heads.target.frozen import FrozenTarget

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite runs the kernels themselves")

BASE: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=256,
    initializer_range=0.3,
    eos_token_id=2,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": dict(sliding_window=4),
    "qwen3_moe": dict(num_experts=4, decoder_sparse_step=1, num_experts_per_tok=2, moe_intermediate_size=16),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heads.backends.triton.runtime.ON_CPU", True)


def make_target(family: str) -> FrozenTarget:
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES[family]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if "experts" in str(model):
        model.set_experts_implementation("eager")
    return FrozenTarget(model, family)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen3", "chain:2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("llama", "tree:3x2x6"), ("llama", "static:2.1.1"), ("mistral", "tree:3x2x6")),
                ("qwen3_moe", "chain:2"),
            )
        ),
    ],
)
def test_drafts_are_those_of_torch(family: str, shape: str) -> None:
    model_drafts_are_those_of_torch(make_target(family), shape)
