"""Figures of the GPU's form that need no card: launches of a step, and bytes of a prompt, at the shape of
Llama-3.1-8B, of tensors that have no memory."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from eval.runtime.target_step import TargetStep
from heads.backends.selection import TRITON
from heads.backends.slot_mapping import CacheSpec
from heads.backends.triton.cached_decoder import TritonDecoder
from heads.backends.triton.gemm import TILES
from heads.backends.triton.products import Products, shape_of
from heads.target.frozen import FrozenTarget
from heads.tree import Proposal
from scripts.grown.shapes import SHAPES
from tests.launches import Launches

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite runs the kernels themselves")

LAYERS = 3
A_LAYER = 8
"""Launches of a layer whose products are all the kernel's, at most."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heads.backends.triton.runtime.ON_CPU", True)
    monkeypatch.setattr("heads.target.frozen.fingerprint", lambda model: "of no numbers")


def large_target() -> FrozenTarget:
    """Of few layers; a random one without memory."""
    shape = SHAPES["llama-3.1-8b"]
    config = LlamaConfig(**vars(shape) | {"num_hidden_layers": LAYERS}, max_position_embeddings=1 << 17)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        nn.Module.to(model, torch.bfloat16)
    return FrozenTarget(model, "large")


def large_step(target: FrozenTarget, nodes: int, capacity: int = 4096) -> TargetStep:
    """Every product by the kernel."""
    decoder = TRITON.decoder(target, CacheSpec(batch_size=1, capacity=capacity, widths=(nodes,)))
    assert isinstance(decoder, TritonDecoder)
    passes = decoder.passes
    passes.products = Products({nodes: {shape_of(w): str(TILES[0]) for w in passes.weights()}})
    return TargetStep(target, decoder)


@pytest.mark.parametrize("nodes", [1, 6, 32])
@torch.no_grad()
def test_a_step_is_few_launches(nodes: int) -> None:
    """A plain step, `chain:5` and `tree:6x8x32`."""
    step = large_step(large_target(), nodes)
    ids = torch.zeros(1, nodes, dtype=torch.int64, device="meta")
    with Launches(runs=False) as launches:
        step.verify(Proposal(ids, ids, ids, ids.float()), None, ids[:, 0], 4096, 6)
    assert launches.names["_attention"] == LAYERS
    assert launches.names.total() <= A_LAYER * LAYERS + 10, launches.names
