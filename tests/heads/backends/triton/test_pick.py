"""The kernels that pick a level's children, in Triton's interpreter, against tensor operations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.sampling import Sampling
from heads.backends.torch.noise import gumbel
from heads.backends.torch.sampling import SHARPNESS, RowSampling
from heads.backends.triton.availability import constexpr, jit, tl
from heads.backends.triton.noise import key_of, noise_of
from heads.backends.triton.pick import Noise, TritonSampling, best_columns
from heads.tree import Proposal
from scripts.gpu.kernels import tree_works
from tests.closeness import assert_close
from tests.launches import Launches
from tests.samplings import rows_of

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are run"),
    pytest.mark.usefixtures("interpreted"),
]

SETTINGS = Sampling(temperature=0.7, seed=-3), Sampling(), Sampling(temperature=1.3, seed=2**62)


def wide(generator: torch.Generator, *size: int) -> Tensor:
    """Logits that are a part of wider ones."""
    return 3 * torch.randn(*size[:-1], size[-1] + 5, generator=generator)[..., : size[-1]]


@pytest.mark.parametrize("positions", ["level", "own"])
@pytest.mark.parametrize("settings", [SETTINGS, (Sampling(),) * 3], ids=["sampled", "greedy"])
@pytest.mark.parametrize(("W", "V", "count"), [(1, 2500, 1), (8, 1300, 8), (3, 70, 4), (19, 40, 5), (2, 5, 5)])
@pytest.mark.parametrize("named", [False, True])
def test_picks_are_those_of_tensor_operations(
    positions: str, settings: tuple[Sampling, ...], W: int, V: int, count: int, named: bool
) -> None:
    generator = torch.Generator().manual_seed(W)
    rows, twin, logits = rows_of(TritonSampling, *settings), rows_of(RowSampling, *settings), wide(generator, 3, W, V)
    logits[:, 0, V // 2 + 3 :] = -torch.inf  # as padding is: perhaps a whole block
    at = torch.randint(2**40, (3, W), generator=generator)
    at = at[:, :1].expand(-1, W) if positions == "level" else at
    ids = torch.randperm(3 * V, generator=generator)[:V].sort().values if named else None
    tokens, logp = rows.pick(logits, at, count, ids)
    expected, distribution = twin.pick(logits, at, count, ids)
    assert torch.equal(tokens, expected) and tokens.dtype == torch.int64
    assert_close(logp, distribution, roundings=16)


def test_one_distribution_for_a_level_is_picked_from_once() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, at = wide(generator, 3, 1, 99).expand(-1, 4, -1), torch.tensor([[4], [5], [6]]).expand(-1, 4)
    rows, twin = rows_of(TritonSampling, *SETTINGS), rows_of(RowSampling, *SETTINGS)
    for found, expected in zip(rows.pick(logits, at, 3), twin.pick(logits, at, 3), strict=True):
        assert found.stride(1) == 0
        assert_close(found, expected, roundings=16)


@pytest.mark.parametrize(("V", "count"), [(70, 4), (2300, 8)])
def test_of_equal_scores_the_lowest_column_stands_first(V: int, count: int) -> None:
    logits = torch.randint(3, (2, 3, V), generator=torch.Generator().manual_seed(1)).float()
    logits[..., 1::2] = -torch.inf
    tokens, logp = rows_of(TritonSampling, Sampling(), Sampling()).pick(
        logits, torch.zeros(2, 3, dtype=torch.int64), count
    )
    order = (-logits).argsort(dim=-1, stable=True)[..., :count]
    assert torch.equal(tokens, order)
    torch.testing.assert_close(logp, (SHARPNESS * logits).log_softmax(-1).gather(-1, order))


def test_what_is_no_number_is_picked_last() -> None:
    """And no column twice: a token that does not exist would be read beyond the embedding."""
    logits = torch.full((1, 2, 6), torch.nan)
    logits[0, 0, 4] = 1.0
    tokens, _ = rows_of(TritonSampling, Sampling()).pick(logits, torch.zeros(1, 2, dtype=torch.int64), 4)
    assert tokens.tolist() == [[[4, 0, 1, 2], [0, 1, 2, 3]]]


@jit
def _write(SEEDS: Any, POSITIONS: Any, TOKENS: Any, OUT: Any, W: constexpr, V: constexpr) -> None:
    b, w, v = tl.program_id(0), tl.arange(0, W), tl.arange(0, V)
    key = key_of(tl.load(SEEDS + b), tl.load(POSITIONS + b * W + w))
    tl.store(OUT + (b * W + w)[:, None] * V + v[None], noise_of(key[:, None], tl.load(TOKENS + v)[None]))


def test_noise_is_that_of_tensor_operations_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (5,), generator=generator)
    positions = torch.randint(2**40, (5, 16), generator=generator)
    tokens = torch.randint(2**17, (4096,), generator=generator)
    found = torch.empty(5, 16, 4096)
    _write[(5,)](seeds, positions, tokens, found, W=16, V=4096)
    unlike = found != gumbel(seeds, positions, tokens)
    assert int(unlike.sum()) <= 1  # of a third of a million; one in some hundred millions is expected


def test_a_greedy_row_beside_a_sampled_one_is_picked_as_alone() -> None:
    logits, at = wide(torch.Generator().manual_seed(3), 2, 4, 600), torch.zeros(2, 4, dtype=torch.int64)
    mixed = rows_of(TritonSampling, Sampling(temperature=0.9, seed=1), Sampling())
    alone = rows_of(TritonSampling, Sampling())
    for found, expected in zip(mixed.pick(logits, at, 5), alone.pick(logits[1:], at[1:], 5), strict=True):
        assert torch.equal(found[1:], expected)


def test_columns_out_of_order_in_memory_are_read_all_the_same() -> None:
    logits = torch.randn(50, 2, 3, generator=torch.Generator().manual_seed(5)).movedim(0, 2)
    rows, at = rows_of(TritonSampling, *SETTINGS[:2]), torch.arange(6).view(2, 3)
    noise = Noise(at, rows.temperature, rows.seed)
    ours, theirs = (best_columns(x, 4, None, noise) for x in (logits, logits.contiguous()))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_more_than_a_program_compares_is_picked_by_tensor_operations() -> None:
    rows, logits, at = (
        rows_of(TritonSampling, Sampling()),
        torch.randn(1, 2, 30_000),
        torch.zeros(1, 2, dtype=torch.int64),
    )
    with Launches(runs=False) as launches:
        tokens, _ = rows.pick(logits, at, 300)
    assert torch.equal(tokens, logits.topk(300).indices) and "_best_of_block" not in launches.names


def test_what_is_timed_runs_through() -> None:
    timed = tree_works("tree:3x3x9", torch.device("cpu"), columns=90)
    assert len(timed) == 3
    for _, size, work in timed:
        made = work()
        assert size > 0 and (made.tokens if isinstance(made, Proposal) else made[0]).shape[-1] in (9, 3)
