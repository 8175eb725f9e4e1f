"""Figures of the GPU's form that need no card: launches of a round at the shape of Llama-3.1-8B, of tensors that have
no memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from eval.runtime.engine import Engine, EngineOptions
from heads.backends.triton.gemm import TILES, Tile
from heads.backends.triton.products import Products
from heads.target.frozen import FrozenTarget
from heads.tree import parse_shape
from scripts.gpu.draft_steps import large_head
from scripts.grown.shapes import SHAPES
from tests.launches import Launches

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite runs the kernels themselves"),
    pytest.mark.usefixtures("interpreted"),
]

LAYERS = 6
"""Of the target, three of them with auxiliary hidden states."""


@pytest.fixture
def large_target(monkeypatch: pytest.MonkeyPatch) -> FrozenTarget:
    """A random target of few layers, without memory."""
    monkeypatch.setattr("heads.target.frozen.fingerprint", lambda model: "of no numbers")
    monkeypatch.setattr("eval.runtime.round.mask_fault", lambda step: None)
    monkeypatch.setattr("eval.runtime.engine.try_rounds", lambda decoder: None)
    shape = SHAPES["llama-3.1-8b"]
    config = LlamaConfig(**vars(shape) | {"num_hidden_layers": LAYERS}, max_position_embeddings=1 << 17)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        nn.Module.to(model, torch.bfloat16)
    return FrozenTarget(model, "large")


class ByKernel(Products):
    """Every product by the kernel."""

    def __init__(self) -> None:
        super().__init__({})

    def tile(self, x: Tensor, weight: Tensor) -> Tile:
        return TILES[0]


@pytest.mark.parametrize(("tree", "beside"), [("none", 13), ("chain:5", 85), ("tree:6x8x32", 103)])
@torch.no_grad()
def test_a_round_is_few_launches(tree: str, beside: int, large_target: FrozenTarget) -> None:
    """Eight a layer, and few beside them: those of an EAGLE-3 head, which has twelve a step, among them."""
    head = None if tree == "none" else large_head("eagle3", SHAPES["llama-3.1-8b"], torch.device("meta"))[0]
    options = EngineOptions(shape=parse_shape(tree), max_length=4096, backend="triton")
    engine: Any = Engine(large_target, head, options)
    engine.decoder.step.decoder.products = ByKernel()
    if head is not None:
        state = engine.decoder.head_state
        state.steps.products = ByKernel()
        state.backend = replace(state.backend, on_host=False)  # as on a card, where lengths are not looked at
    with Launches(runs=False):
        engine.decoder.round(4096)  # what is made once
    with Launches(runs=False) as launches:
        engine.decoder.round(4096)
    assert launches.names["_attention"] >= LAYERS
    assert launches.names.total() <= 8 * LAYERS + beside, launches.names
