"""The processed distribution equals a plain reference, draws follow it, and the noise is a pure function."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from eval.runtime.distribution import RowSampling
from eval.runtime.request import Request
from eval.runtime.round import read_prompts
from eval.runtime.sampling_params import Sampling
from heads.kernels.gumbel import gumbel
from tests.eval.runtime.conftest import target_of
from tests.support.closeness import assert_close
from tests.support.enumeration import chi_square
from tests.support.refusals import refused
from tests.support.small_targets import make_drafter, open_engine

MASK, GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15


def rows_of(*samplings: Sampling) -> RowSampling:
    rows = RowSampling(len(samplings))
    for row, sampling in enumerate(samplings):
        rows.set_row(row, sampling)
    return rows


def splitmix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def reference_distribution(logits: Tensor, s: Sampling) -> Tensor:
    """One row (V,), by the textbook, in float64."""
    if s.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    p = torch.softmax(logits.double() / s.temperature, dim=0)
    order = sorted(range(len(p)), key=lambda i: (-p[i].item(), i))
    if s.top_k:
        order = order[: s.top_k]
    mass = sum(p[i].item() for i in order)
    kept, total = [], 0.0
    for i in order:
        if total >= s.top_p * mass:
            break
        kept.append(i)
        total += p[i].item()
    kept = [i for i in kept if p[i] >= s.min_p * p[order[0]]]
    distribution = torch.zeros_like(p)
    distribution[kept] = p[kept]
    return distribution / distribution.sum()


def assert_follows(distribution: Tensor, logits: Tensor, sampling: Sampling) -> None:
    expected = reference_distribution(logits, sampling)
    torch.testing.assert_close(distribution.double(), expected, atol=1e-6, rtol=1e-5)


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3, top_k=5),
    Sampling(temperature=1.5, top_p=0.7),
    Sampling(temperature=0.8, min_p=0.2),
    Sampling(temperature=1.1, top_k=6, top_p=0.9, min_p=0.05),
    Sampling(temperature=2.0, top_k=1),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.0, top_k=500),
]


def test_a_mixed_batch_follows_each_rows_own_distribution() -> None:
    torch.manual_seed(1)
    logits = torch.randn(len(SETTINGS) + 1, 3, 17) * 2
    rows = rows_of(*SETTINGS, Sampling())
    distribution = rows.log_distribution(logits).exp()
    for b, sampling in enumerate(SETTINGS):
        for w in range(3):
            assert_follows(distribution[b, w], logits[b, w], sampling)
    assert torch.equal(distribution[-1], torch.nn.functional.one_hot(logits[-1].argmax(-1), 17).float())


PENALISED = [
    Sampling(temperature=0.8, repetition_penalty=1.7),
    Sampling(temperature=1.3, top_k=9, repetition_penalty=0.6, presence_penalty=1.5, frequency_penalty=-0.7),
    Sampling(presence_penalty=-1.0, frequency_penalty=2.0),
    Sampling(temperature=1.1),
]


@pytest.mark.parametrize("tree", ["chain:3", "static:3.2"])
def test_the_penalties_of_a_node_are_those_of_the_text_up_to_it(tree: str) -> None:
    """By transformers' processor, and by counting, in the fourth round."""
    target, prompt = target_of("llama"), [5, 7, 9, 5, 7]
    head = make_drafter("early_exit:2", target)
    decoder = open_engine(target, head, tree, batch_size=len(PENALISED), max_length=64, rule="ratio").decoder
    with torch.inference_mode():
        read_prompts(decoder, {row: Request(prompt, 30, s, (), True) for row, s in enumerate(PENALISED)})
        for _ in range(3):
            decoder.round(64)
        proposal = decoder.propose()
        found = decoder.verify(proposal, 64)[1][1]
    for row, sampling in enumerate(PENALISED):
        texts = [decoder.state.output[row, : decoder.state.output_length[row]].tolist()]
        for token, parent in zip(proposal.tokens[row].tolist(), proposal.parents[row].tolist(), strict=True):
            node = len(texts) - 1
            texts.append([*texts[parent + 1], token] if node else texts[0])
            ids = torch.tensor([[*prompt, *texts[-1]]])
            processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            logits = processor(ids, target.model(ids).logits[:, -1])[0]
            for seen, count in Counter(texts[-1]).items():
                logits[seen] -= sampling.presence_penalty + sampling.frequency_penalty * count
            assert_follows(found[row, node], logits, sampling)


def test_ties_are_cut_at_the_lowest_ids() -> None:
    rows = rows_of(Sampling(temperature=1.0, top_k=2))
    distribution = rows.log_distribution(torch.tensor([[[1.0, 3.0, 3.0, 3.0]]])).exp()
    assert distribution[0, 0].tolist() == [0.0, 0.5, 0.5, 0.0]
    assert rows_of(Sampling()).choose(torch.tensor([[[1.0, 3.0, 3.0]]]), torch.zeros(1, 1).long()).item() == 1


def test_padded_ids_are_never_chosen_and_extremes_stay_finite() -> None:
    logits = torch.tensor([5e4, -5e4, 0.0, -torch.inf]).expand(2, 1, 4)
    rows = rows_of(Sampling(temperature=1e-6, top_k=3), Sampling(temperature=1e3, top_p=0.99))
    distribution = rows.log_distribution(logits).exp()
    assert torch.isfinite(distribution).all() and (distribution[..., 3] == 0).all()
    torch.testing.assert_close(distribution.sum(-1), torch.ones(2, 1))


@pytest.mark.parametrize("sampling", SETTINGS[:5])
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    V, seeds, positions = 12, 40, 500
    logits = torch.linspace(-1.5, 2.0, V)[torch.randperm(V, generator=torch.Generator().manual_seed(3))]
    rows = rows_of(*(Sampling(**{**vars(sampling), "seed": 1000 + i}) for i in range(seeds)))
    chosen = rows.choose(logits.expand(seeds, positions, V), torch.arange(positions).expand(seeds, positions))
    statistic, limit = chi_square(chosen.flatten(), reference_distribution(logits, sampling))
    assert statistic < limit


def test_noise_equals_integer_arithmetic_done_by_hand() -> None:
    seeds, positions, ids = [0, -5, 2**62 + 3], [0, 7, 123456], [0, 1, 151_000]
    noise = gumbel(torch.tensor(seeds), torch.tensor([positions] * 3), torch.tensor(ids))
    for b, seed in enumerate(seeds):
        for w, position in enumerate(positions):
            key = splitmix((splitmix(seed & MASK) + position * GOLDEN) & MASK)
            for v, token in enumerate(ids):
                u = torch.tensor(((splitmix((key + token * GOLDEN) & MASK) >> 12) + 0.5) / 2**52, dtype=torch.float64)
                assert noise[b, w, v].item() == (-torch.log(-torch.log1p(-u))).float().item()


def test_drafts_get_the_noise_the_target_will_use() -> None:
    torch.manual_seed(0)
    rows = rows_of(Sampling(temperature=0.7, seed=9), Sampling())
    logits, positions = torch.randn(2, 3, 40), torch.tensor([[5, 6, 7], [9, 9, 10]])
    scores = rows.perturb(logits, positions)
    assert torch.equal(scores[1], logits[1])
    assert torch.equal(scores.argmax(-1), rows.choose(logits, positions))
    ids = torch.tensor([3, 17, 39])  # a draft vocabulary: its columns take the noise of their target ids
    torch.testing.assert_close(rows.perturb(logits[..., ids], positions, ids), scores[..., ids])
    greedy = rows_of(Sampling(), Sampling())
    assert torch.equal(greedy.perturb(logits, positions), logits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_k", 10**20), ("top_p", 0.0)),
        *(("top_p", 1.5), ("min_p", -0.1), ("seed", 2**63), ("repetition_penalty", 0.0)),
        *(("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", float("nan"))),
    ],
)
def test_bad_settings_are_refused(name: str, value: float) -> None:
    assert name in refused(Sampling, **{"temperature": 1.0, name: value})


@pytest.mark.parametrize("shared", [False, True], ids=["distributions of their own", "one distribution"])
def test_a_level_at_one_position_is_picked_as_its_nodes_would_be_alone(shared: bool) -> None:
    """True if the rows of a level are views of one, as a tree's positions are, or copies of it."""
    rows = rows_of(Sampling(temperature=0.7, seed=5), Sampling())
    logits = torch.randn(2, 1 if shared else 4, 11, generator=torch.Generator().manual_seed(1)).expand(-1, 4, -1)
    positions = torch.tensor([[7], [9]]).expand(-1, 4)
    ids = torch.arange(11) * 3
    found = rows.pick(logits, positions, 3, ids)
    for w in range(4):
        alone = rows.pick(logits[:, w : w + 1].clone(), positions[:, w : w + 1].clone(), 3, ids)
        for part, expected in zip(found, alone, strict=True):
            assert torch.equal(part[:, w : w + 1], expected)


def test_greedy_rows_are_ranked_by_sharper_probabilities_and_sampled_ones_by_their_scores() -> None:
    logits = 3 * torch.randn(2, 3, 13, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[4, 4, 4], [9, 9, 9]])
    noise = gumbel(torch.tensor([0, 3]), positions, torch.arange(13))
    scores = torch.stack([1.5 * logits[0], logits[1] / 0.8 + noise[1]])
    expected = scores.log_softmax(-1).topk(4)
    ids, logp = rows_of(Sampling(), Sampling(temperature=0.8, seed=3)).pick(logits, positions, 4)
    assert torch.equal(ids, expected.indices)
    assert_close(logp, expected.values, roundings=16)
