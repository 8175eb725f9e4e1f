"""Kernels decode and draft what torch decodes and drafts, on a GPU, in float32."""

import pytest
import torch

from eval.runtime.engine import Engine, EngineOptions
from heads.backends.triton.decoder import TritonDecoder
from heads.tree import parse_shape
from tests.drafting import drafts_are_those_of_torch, model_drafts_are_those_of_torch
from tests.small_targets import FAMILIES, make_head, make_target, some_requests, texts

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_decodes_alike_with_and_without_kernels(family: str) -> None:
    """Kernels and graphs against the Hugging Face model's plain rounds."""
    target = make_target(family, torch.float32, CUDA)
    requests = some_requests(target.vocab_size, 3, 24)
    options = EngineOptions(batch_size=2, max_length=256, backend="huggingface", graphs=False)
    expected = Engine(target, None, options).generate(requests)
    for shape in ("none", "chain:3", "tree:3x3x8"):
        head = make_head(target) if shape != "none" else None
        engine = Engine(target, head, EngineOptions(shape=parse_shape(shape), batch_size=2, max_length=256))
        assert isinstance(engine.decoder.step.decoder, TritonDecoder), f"{family} has no kernels"
        assert texts(engine.generate(requests)) == texts(expected), (family, shape)


@pytest.mark.parametrize(
    "name", ["eagle3", "eagle3.1", "eagle3 as speculators has it", "eagle3 with a window", "mtp", "mtp, token first"]
)
def test_a_head_drafts_alike_with_and_without_kernels(name: str) -> None:
    """Chains, dynamic and static trees; a long prompt."""
    for shape in ("chain:1", "chain:4", "tree:4x3x12", "tree:4x22x40", "static:3.2.1"):
        drafts_are_those_of_torch(name, shape, CUDA)
    drafts_are_those_of_torch(name, "tree:4x3x12", CUDA, prompt=300, table=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_drafts_alike_with_and_without_kernels(family: str) -> None:
    """Chains, dynamic and static trees; a long prompt."""
    target = make_target(family, torch.float32, CUDA)
    for shape in ("chain:4", "tree:4x3x12", "static:3.2.1"):
        model_drafts_are_those_of_torch(target, shape)
    model_drafts_are_those_of_torch(target, "tree:3x3x12", prompt=300)
