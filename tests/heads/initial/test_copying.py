"""Attention that begins by copying: untrained, it drafts what followed the same token before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import Batch
from heads.errors import UserError
from heads.registry import build_head
from heads.target.frozen import FrozenTarget, load_target

ROOT = Path(__file__).parents[3]
LENGTH = 48


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    """A trained one: states of a random one do not tell tokens apart."""
    return load_target(str(ROOT / "recipes/quickstart/target"), dtype=torch.float32)


def repeating_texts(vocab: int, distance: int) -> tuple[Tensor, Tensor]:
    """(B, T) random tokens whose last one is met `distance` slots before, and (B,) the token that follows there."""
    torch.manual_seed(distance)
    tokens = torch.stack([torch.randperm(vocab)[:LENGTH] for _ in range(64)])
    tokens[:, -1] = tokens[:, -1 - distance]
    return tokens, tokens[:, -distance]


def batch_of(tokens: Tensor, target: FrozenTarget, aux_layer_ids: tuple[int, ...]) -> Batch:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    documents = torch.zeros_like(tokens)
    features = target.packed_features(tokens, positions, documents, aux_layer_ids)
    embeddings, everywhere = target.shared.embed_tokens(tokens), torch.ones_like(tokens, dtype=torch.bool)
    streams = features.aux_hidden_states, features.hidden
    return Batch(tokens, everywhere, positions, documents, embeddings, *streams, target.shared)


@torch.no_grad()
def drafted_logits(head: Any, batch: Batch) -> Tensor:
    """The head's logits (B, V) of what follows the last token; slot t reads the token of slot t + 1."""
    state = head.unroll(batch, 1)[0][:, -2]
    return head.logits(state, head.lm_head_weight(batch.shared))  # type: ignore[no-any-return]


@pytest.mark.parametrize("distance", [3, 17, 40])
@pytest.mark.parametrize(("kind", "share"), [("eagle3", 0.05), ("mtp", 0.7)])  # MTP mixes token and state in one width
def test_a_head_drafts_what_followed_a_token_before(
    target: FrozenTarget, kind: str, share: float, distance: int
) -> None:
    tokens, following = repeating_texts(target.vocab_size, distance)
    ranks = {}
    for initial in ("copying", "target"):
        torch.manual_seed(0)
        head = build_head(kind, {"initial_weights": initial}, target, torch.ones(target.vocab_size))
        logits = drafted_logits(head, batch_of(tokens, target, head.aux_layer_ids))
        ranks[initial] = (logits > logits.gather(1, following[:, None])).sum(-1).float().median()
    assert ranks["copying"] < share * ranks["target"], ranks


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_finds_the_slot_of_its_root(target: FrozenTarget, kind: str) -> None:
    torch.manual_seed(0)
    settings = {"initial_weights": "copying", "mask_token_id": target.vocab_size - 1, "num_layers": 2}
    head = build_head(kind, settings, target, torch.ones(target.vocab_size))
    tokens, _ = repeating_texts(target.vocab_size - 1, 21)
    batch = batch_of(tokens[:, :-1], target, head.aux_layer_ids)
    attention, d = head.layers[0].self_attn, head.config.head_dim
    with torch.no_grad():
        root = head.layers[0].input_layernorm(target.shared.embed_tokens(tokens[:, -1]))
        keys = attention.k_norm(attention.k_proj(head.fuse(batch.aux_hidden_states)).unflatten(-1, (-1, d)))[:, :, 0]
        query = attention.q_norm(attention.q_proj(root).unflatten(-1, (-1, d)))[:, 0]
    found = (keys @ query[..., None])[..., 0].argmax(-1)  # of positions alike
    assert (found == LENGTH - 1 - 21).float().mean() > 0.8


def test_an_unknown_start_is_refused(target: FrozenTarget) -> None:
    with pytest.raises(UserError, match=r"head\.initial_weights.*copying.*'zeros'"):
        build_head("eagle3", {"initial_weights": "zeros"}, target, torch.ones(target.vocab_size))
