"""The pass over whole rows is the target's own on packed documents; in bfloat16 it errs as little as autocast."""

import pytest
import torch
from torch import Tensor

from heads.backends.cpu.whole import WholePass, whole_pass
from heads.backends.torch.architectures import native_decoder
from tests.heads.backends.torch.test_decoders import VARIANTS, make_target
from train.data.features import make_batch
from train.data.packing import Rows

AUX_LAYER_IDS = (0, 2, 3)
SIMPLE = [name for name in VARIANTS if name.split()[0] in ("llama", "mistral", "qwen2", "qwen3")]


def packed_rows(B: int = 2, T: int = 150) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and documents of rows longer than a block, with padding at the end of the first."""
    documents = torch.stack([(torch.arange(T) >= 20 + 90 * row).long() for row in range(B)])
    documents[0, T - 9 :] = -1
    begins = torch.stack([(documents == documents[:, t : t + 1]).int().argmax(1) for t in range(T)], 1)
    tokens = torch.randint(61, (B, T), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(T) - begins, documents


@pytest.mark.parametrize("variant", SIMPLE)
def test_features_are_the_targets_own(variant: str) -> None:
    target = make_target(variant)
    rows = packed_rows()
    decoder = native_decoder(target)
    assert decoder is not None
    found, wanted = (
        WholePass(decoder, torch.float64)(*rows, AUX_LAYER_IDS),
        target.packed_features(*rows, AUX_LAYER_IDS),
    )
    torch.testing.assert_close(
        found.aux_hidden_states, wanted.aux_hidden_states, atol=1e-5, rtol=1e-5
    )  # the family's norms are in float32
    torch.testing.assert_close(found.hidden, wanted.hidden, atol=1e-5, rtol=1e-5)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_training_reads_by_it_in_the_dtype_of_its_products(variant: str) -> None:
    target = make_target(variant, torch.float32)
    tokens, positions, documents = packed_rows()
    rows = Rows(tokens, torch.ones_like(tokens, dtype=torch.bool), positions, documents)
    wanted = target.packed_features(tokens, positions, documents, AUX_LAYER_IDS)
    with torch.autocast("cpu", torch.bfloat16):
        batch = make_batch(target, rows, AUX_LAYER_IDS, torch.float32)
        library = target.packed_features(tokens, positions, documents, AUX_LAYER_IDS)
    whole = whole_pass(target, torch.bfloat16)
    assert whole is not None and whole is whole_pass(target, torch.bfloat16)
    assert torch.equal(batch.hidden, whole(tokens, positions, documents, AUX_LAYER_IDS).hidden)
    assert batch.hidden.dtype == batch.aux_hidden_states.dtype == torch.float32
    for own, others, exact in (
        (batch.aux_hidden_states, library.aux_hidden_states, wanted.aux_hidden_states),
        (batch.hidden, library.hidden, wanted.hidden),
    ):
        assert distance(own, exact) < 1.5 * distance(others, exact) < 0.05
    plain = make_batch(target, rows, AUX_LAYER_IDS, torch.float32).hidden
    assert distance(plain, wanted.hidden) < 1e-6


def test_other_targets_read_by_the_library() -> None:
    for family in ("mixtral", "deepseek_v2"):
        assert whole_pass(make_target(family, torch.float32), torch.float32) is None
