"""Packed rows without a (T, T) mask: equal to the masked pass for every family, gradients included."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heads.targets.frozen_target import FrozenTarget
from heads.targets.hf_forward import FLEX, decode, decode_packed
from heads.targets.masks import TILE, packed_mask, packed_visible
from tests.heads.conftest import largest_tensor
from tests.heads.targets.test_frozen_target import make_model

ON_INTERFACE = ["llama", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen2 mixed"]


def rows(T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of documents longer and shorter than a tile and a window, one padded: tokens, positions, documents."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.stack([torch.arange(T) // 150, (torch.arange(T) > 7).long()])
    documents[1, T - 20 :] = -1
    positions = torch.stack([torch.arange(T) % 150, torch.arange(T) - 8 * (torch.arange(T) > 7)])
    return torch.randint(3, 40, (2, T), generator=generator), positions, documents


def masked(target: FrozenTarget, tokens: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
    at: dict[str, Any] = {"positions": positions, "key_positions": positions}
    return decode(target.base, target.config, target.dtype, tokens, **at, visible=packed_visible(documents))


def by_blocks(target: FrozenTarget, tokens: Tensor, positions: Tensor, documents: Tensor, **how: Any) -> Tensor:
    given = target.base, target.config, target.dtype, tokens
    return decode_packed(*given, positions=positions, documents=documents, **how)


@pytest.mark.parametrize("family", ON_INTERFACE)
def test_states_and_gradients_equal_those_under_a_mask(family: str) -> None:
    target = FrozenTarget(make_model(family, max_position_embeddings=512).eval(), family)
    given, weights = rows(300), [p for p in target.base.parameters() if p.ndim > 1]
    for weight in weights:
        weight.requires_grad_()
    keep = given[2] >= 0
    found = []
    for run in (masked, by_blocks):
        states = run(target, *given)[keep]
        grads = torch.autograd.grad(states.pow(3).sum(), weights, allow_unused=True)
        found.append([states, *(grad for grad in grads if grad is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * float(a.detach().abs().max()), rtol=1e-4)


def test_no_tensor_of_the_square_of_the_length_is_made() -> None:
    T = 1024
    target = FrozenTarget(make_model("mistral", max_position_embeddings=T).eval(), "mistral")
    slot = torch.arange(T)[None]
    assert largest_tensor(lambda: by_blocks(target, slot % 40, slot, torch.zeros_like(slot))) < T * T / 4


@pytest.mark.parametrize("window", [None, 5, 140])
def test_the_block_mask_shows_what_the_rule_shows(window: int | None) -> None:
    _, positions, documents = rows(300)
    mask = packed_mask(documents, window)
    wanted = packed_visible(documents)
    if window is not None:
        wanted &= positions[:, :, None] - positions[:, None] < window
    slot, batch = torch.arange(300), torch.arange(2)[:, None, None]
    assert torch.equal(mask.mask_mod(batch, batch, slot[:, None], slot), wanted)
    tiles = torch.nn.functional.pad(wanted, (0, 84, 0, 84)).view(2, 3, TILE, 3, TILE).any(4).any(2)
    assert bool((mask.to_dense()[:, 0].bool() >= tiles).all())  # every tile with a key that is seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of the compiler
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the latter with windows in some layers
def test_flex_attention_by_the_same_block_mask_gives_the_same_states(family: str) -> None:
    target = FrozenTarget(make_model(family, max_position_embeddings=512, head_dim=16).eval(), family)
    given = rows(300)
    with torch.no_grad():
        wanted, found = masked(target, *given), by_blocks(target, *given, attention=FLEX)
    keep = given[2] >= 0
    torch.testing.assert_close(found[keep], wanted[keep], atol=1e-3, rtol=1e-3)
