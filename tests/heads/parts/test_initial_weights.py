"""Initial weights: attention that copies drafts what followed the same token before; a Markov head has bigrams."""

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.blocks.block_attention import Blocks
from heads.blocks.block_initial_weights import PART, bigrams
from heads.core.contract import Batch
from heads.parts.initial_weights import TargetProbe
from heads.registry import build_head
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from heads.targets.target_files import load_tokenizer
from tests.support.small_heads import probe_of, random_batch

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
def median_rank(head: Any, batch: Batch, following: Tensor) -> float:
    """The rank of the tokens `following` (B,) in the head's logits of what follows the last token; slot t reads the
    token of slot t + 1."""
    logits = head.logits(head.unroll(batch, 1)[0][:, -2], head.lm_head_weight(batch.shared))
    return float((logits > logits.gather(1, following[:, None])).sum(-1).float().median())


@pytest.mark.parametrize(
    ("kind", "share"),
    [("eagle3", 0.05), ("mtp", 0.7)],  # MTP mixes token and state in one width
)
def test_a_head_drafts_what_followed_a_token_before(target: FrozenTarget, kind: str, share: float) -> None:
    heads = {}
    for initial in ("copying", "target"):
        torch.manual_seed(0)
        heads[initial] = build_head(kind, {"initial_weights": initial}, target, torch.ones(target.vocab_size))
    for distance in (3, 17, 40):
        tokens, following = repeating_texts(target.vocab_size, distance)
        batch = batch_of(tokens, target, heads["copying"].aux_layer_ids)
        ranks = {initial: median_rank(head, batch, following) for initial, head in heads.items()}
        assert ranks["copying"] < share * ranks["target"], (distance, ranks)


@pytest.mark.parametrize("width", [96, 256])
def test_a_head_of_another_width_begins_in_the_same_way(target: FrozenTarget, width: int) -> None:
    tokens, following = repeating_texts(target.vocab_size, 17)
    torch.manual_seed(0)
    head = build_head("eagle3", {"hidden_size": width}, target, torch.ones(target.vocab_size))
    assert median_rank(head, batch_of(tokens, target, head.aux_layer_ids), following) < 0.05 * target.vocab_size / 2


@torch.no_grad()
def block_logits(head: Any, batch: Batch) -> Tensor:
    """The logits (B, K, V) of a block whose root is the last token."""
    last = batch.tokens.shape[1] - 1
    blocks = Blocks(torch.full((len(batch.tokens), 1), last), torch.ones(len(batch.tokens), 1, dtype=torch.bool))
    states = head.unroll(batch, blocks, head.config.block_size).rows
    assert batch.shared.lm_head_weight is not None
    return states @ batch.shared.lm_head_weight.T  # type: ignore[no-any-return]


def block_head(kind: str, target: FrozenTarget, counts: Tensor, **settings: Any) -> Any:
    torch.manual_seed(0)
    return build_head(kind, {"mask_token_id": target.vocab_size - 1, **settings}, target, counts)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_begins_with_what_followed_its_root_and_else_with_frequencies(target: FrozenTarget, kind: str) -> None:
    """On Python's own source."""
    ids = load_tokenizer(str(ROOT / "recipes/quickstart/target"))(Path(argparse.__file__).read_text(), verbose=False)
    source = torch.tensor(ids.input_ids[: 48 * 96]).view(48, 96)
    counts = torch.bincount(source.flatten(), minlength=target.vocab_size).float()
    head = block_head(kind, target, counts)
    alone = (source[:, :, None] == source[:, None]).sum(-1) == 1
    place = alone[:, 8:80].float().argmax(1) + 8  # a token that stands in its text once
    tokens, row = source.clone(), torch.arange(len(source))
    tokens[:, -1] = source[row, place]
    following = source[row, place + 1]
    found = block_logits(head, batch_of(tokens, target, head.aux_layer_ids))
    shares = (found.argmax(-1) == following[:, None])[alone[row, place]].float().mean(0)
    assert shares[0] > 0.35, shares
    assert shares[1:].max() < 0.1, shares  # the rows behind do not know the root
    share = counts / counts.sum()
    entropy = torch.special.entr(share).sum()
    apart = -(share * found[:, 1:].log_softmax(-1)).sum(-1).mean() - entropy
    alike = math.log(target.vocab_size) - entropy
    assert apart < 0.5 * alike, (apart, alike)  # the divergence of the frequencies from what is read out, and from none


@pytest.mark.parametrize(
    "shape",
    [
        {"num_layers": 1},
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 4},
    ],
)
def test_a_block_head_of_any_shape_begins_with_finite_logits(target: FrozenTarget, shape: dict[str, int]) -> None:
    tokens, _ = repeating_texts(target.vocab_size - 1, 9)
    head = block_head("dflash", target, torch.ones(target.vocab_size), **{"num_layers": 2, **shape})
    assert block_logits(head, batch_of(tokens[:4], target, head.aux_layer_ids)).isfinite().all()


@pytest.fixture
def probe() -> TargetProbe:
    found = probe_of(random_batch([[24], [24]]), torch.ones(16))
    found.token_counts[:] = torch.arange(len(found.token_counts)) % 5
    return found


def expected_logits(probe: TargetProbe) -> tuple[Tensor, Tensor]:
    """(V, V) the mean logits behind each token of the probed text, less the mean of all; (V,) shares of the tokens."""
    V = len(probe.lm_head_weight)
    logits, share = torch.zeros(V, V, dtype=torch.float64), torch.zeros(V, dtype=torch.float64)
    pairs = list(zip(probe.tokens[:, 1:].flatten(), probe.hidden[:, 1:].flatten(0, 1), strict=True))
    for token in range(V):
        behind = [probe.lm_head_weight @ state for seen, state in pairs if seen == token]
        if behind:
            logits[token], share[token] = torch.stack(behind).mean(0), len(behind) / len(pairs)
    return (logits - share @ logits) * (share > 0)[:, None], share


@pytest.mark.parametrize("rank", [1, 3, 8, 16])
def test_the_bias_is_the_best_of_its_rank_by_the_frequencies_of_both_tokens(probe: TargetProbe, rank: int) -> None:
    """Of a share of the mean logits behind each token; at full rank there is no error."""
    expected, share = expected_logits(probe)
    frequency = (probe.token_counts + 0.5).double()
    frequency = frequency / frequency.sum()

    def weigh(logits: Tensor) -> Tensor:
        return share.sqrt()[:, None] * (logits - (logits @ frequency)[:, None]) * frequency.sqrt()

    w1, w2 = bigrams(probe, rank)
    error = weigh((w1 @ w2.T).double() / PART - expected).square().sum()
    least = torch.linalg.svdvals(weigh(expected))[rank:].square().sum()  # Eckart and Young, 1936
    torch.testing.assert_close(error, least, rtol=1e-3, atol=1e-6)


def test_columns_to_spare_can_learn(probe: TargetProbe) -> None:
    w1, w2 = bigrams(probe, 20)
    assert ((w1 != 0).any(0) | (w2 != 0).any(0)).all()
    torch.testing.assert_close(w1 @ w2.T, w1[:, :16] @ w2[:, :16].T)
