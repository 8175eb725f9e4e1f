"""Draft models draft by the kernels of a GPU, in Triton's interpreter, what they draft by torch's operations."""

from typing import Any

import pytest
import torch

from tests.drafting import model_drafts_are_those_of_torch
from tests.small_targets import make_target

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are run"),
    pytest.mark.usefixtures("interpreted"),
]

SIZES: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    max_position_embeddings=256, initializer_range=0.3,
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 4}, "qwen3_moe": {"moe_intermediate_size": 16}}


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
    target = make_target(family, torch.float32, **SIZES, **OWN.get(family, {}))
    model_drafts_are_those_of_torch(target, shape)
