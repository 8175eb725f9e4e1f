"""Noise and choices in C: those of the tensor operations, to the bit."""

import math

import pytest
import torch
from torch import Tensor

from eval.runtime.sampling import Sampling
from heads.backends.cpu import library
from heads.backends.cpu.draws import CpuSampling
from heads.backends.torch import noise
from heads.backends.torch.sampling import SHARPNESS, RowSampling
from tests.closeness import assert_close
from tests.samplings import GOLDEN, MASK, rows_of, splitmix

pytestmark = pytest.mark.skipif(library.load() is None, reason="no C compiler")
SETTINGS = (
    Sampling(temperature=1.0, seed=-3),
    Sampling(),
    Sampling(temperature=0.3, seed=2**62),
    Sampling(temperature=1e-6, seed=8),
)


def unmixed(x: int) -> int:
    """The number that `splitmix` makes x of."""
    x ^= x >> 31 ^ x >> 62
    x = x * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    x ^= x >> 27 ^ x >> 54
    x = x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    return x ^ x >> 30 ^ x >> 60


def test_any_bits_that_can_be_drawn_give_the_true_noise() -> None:
    """Ids that draw the least and the greatest uniform, and those where a logarithm changes its exponent or its
    sign."""
    borders = [
        0.5,
        1 - 0.5**0.5,
        1 - math.exp(-1),
        1 - math.exp(-(0.5**0.5)),
        1 - math.exp(-(2**0.5)),
        1 - math.exp(-2),
    ]
    near = [int(w * 2**52) + step for w in borders for step in range(-40, 41)]
    drawn = [*range(20), *(2**52 - 1 - k for k in range(20)), *(1 << e for e in range(52)), *near]
    key = splitmix((splitmix(5) + 9 * GOLDEN) & MASK)
    ids = [(unmixed(k << 12) - key) * pow(GOLDEN, -1, 1 << 64) & MASK for k in drawn]
    signed = torch.tensor([i - (1 << 64) if i >> 63 else i for i in ids])
    found = CpuSampling(1).gumbel(torch.tensor([5]), torch.tensor([[9]]), signed)[0, 0].tolist()
    for k, made in zip(drawn, found, strict=True):
        exact = -math.log(-math.log1p(-(k + 0.5) / 2**52))
        assert abs(made - exact) <= 0.5001 * math.ulp(1.0) * 2**29 * max(abs(exact), 2**-24), k


def test_noise_is_that_of_tensor_operations() -> None:
    generator, ids = torch.Generator().manual_seed(4), torch.arange(40_003)
    seeds = torch.randint(-(2**62), 2**62, (20,), generator=generator)
    positions = torch.randint(0, 2**40, (20, 10), generator=generator)
    unlike = CpuSampling(1).gumbel(seeds, positions, ids) != noise.gumbel(seeds, positions, ids)
    assert int(unlike.sum()) <= 1  # of eight million; one in some hundred millions is expected


def test_noise_of_an_id_does_not_depend_on_where_it_stands() -> None:
    seeds, positions = torch.tensor([3, -4]), torch.tensor([[5, 6], [0, 2**33]])
    gumbel = CpuSampling(1).gumbel
    whole = gumbel(seeds, positions, torch.arange(1000))
    for ids in (torch.arange(999, -1, -1), torch.arange(1000)[7::13], torch.tensor([64])):
        assert torch.equal(gumbel(seeds, positions, ids), whole[..., ids])


def odd_logits(generator: torch.Generator) -> Tensor:
    """(4, 9, 2000) logits, enough for two threads; among them ties, padding, and what no decoder should give."""
    logits = torch.randn(4, 9, 2000, generator=generator) * 3
    logits[:, 1] = logits[:, 1].round()
    logits[:, 2, 500:] = -torch.inf
    logits[:, 3] = 1e4
    logits[:, 4, 300] = torch.inf
    logits[:, 5, 40:42] = torch.nan
    logits[:, 6] = -torch.inf
    logits[:, 7, 700] = 80.0
    return logits


@pytest.mark.parametrize("threads", [1, 3])
def test_choices_are_those_of_tensor_operations(threads: int) -> None:
    before, generator = torch.get_num_threads(), torch.Generator().manual_seed(1)
    torch.set_num_threads(threads)
    rows, logits = rows_of(CpuSampling, *SETTINGS), odd_logits(generator)
    positions = torch.randint(0, 50, (4, 9), generator=generator).sort().values
    found = rows.choose(logits, positions)
    torch.set_num_threads(before)
    assert torch.equal(found[1], logits[1].argmax(-1))
    for b in range(4):
        for w in range(9):
            alone = rows_of(CpuSampling, SETTINGS[b]).choose(
                logits[b : b + 1, w : w + 1], positions[b : b + 1, w : w + 1]
            )
            assert alone.item() == found[b, w]
    with_filters = rows_of(
        CpuSampling, *SETTINGS[:3], Sampling(temperature=1.0, top_k=4)
    )  # the whole batch takes tensor operations
    usual = torch.tensor([0, 1, 2, 3, 7, 8])
    others = with_filters.choose(logits, positions)
    assert torch.equal(others[:3, usual], found[:3, usual])
    assert torch.equal(rows_of(RowSampling, *SETTINGS).choose(logits, positions), found)


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("vocabulary", ["whole", "draft"])
def test_picks_are_those_of_tensor_operations(count: int, vocabulary: str) -> None:
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(4, 5, 333, generator=generator) * 3
    logits[:, 1, 200:] = -torch.inf
    positions = torch.tensor([[7, 7, 7, 8, 8]]).expand(4, 5)
    ids = torch.randperm(1000, generator=generator)[:333].sort().values if vocabulary == "draft" else None
    tokens, logp = rows_of(CpuSampling, *SETTINGS).pick(logits, positions, count, ids)
    expected, expected_logp = rows_of(RowSampling, *SETTINGS).pick(logits, positions, count, ids)
    assert torch.equal(tokens, expected)
    assert_close(logp[:3], expected_logp[:3], roundings=16)
    assert_close(logp[3], expected_logp[3], roundings=16)  # scores of millions, in steps of a half


def test_ties_are_picked_lowest_first() -> None:
    logits = torch.zeros(1, 1, 200)
    logits[..., 150:] = 1.0
    tokens, logp = rows_of(CpuSampling, Sampling()).pick(logits, torch.zeros(1, 1, dtype=torch.int64), 4)
    assert tokens.tolist() == [[[150, 151, 152, 153]]]
    torch.testing.assert_close(logp, (SHARPNESS * logits).log_softmax(-1)[..., 150:154])


def test_other_numbers_take_tensor_operations() -> None:
    rows, positions = rows_of(CpuSampling, Sampling(temperature=1.0, seed=2)), torch.arange(3)[None]
    logits = torch.randn(1, 3, 50).bfloat16()
    assert torch.equal(rows.choose(logits, positions), rows.choose(logits.float(), positions))
