"""A Markov head that begins as the target's own bigrams."""

import pytest
import torch
from torch import Tensor

from heads.initial.start import PART, TargetProbe, bigrams
from tests.heads.small_heads import probe_of, random_batch


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


def test_at_full_rank_the_bias_is_a_share_of_the_logits_behind_each_token(probe: TargetProbe) -> None:
    w1, w2 = bigrams(probe, 16)
    expected, _ = expected_logits(probe)
    torch.testing.assert_close((w1 @ w2.T).double(), PART * expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_at_a_lower_rank_it_is_the_best_one_by_the_frequencies_of_both_tokens(probe: TargetProbe, rank: int) -> None:
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
