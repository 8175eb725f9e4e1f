"""The two kernels in Triton's interpreter against torch operations, over random shapes, ragged lengths, full caches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.kernels.choose_token import choose_in_tiles, logits_in_tiles
from heads.kernels.gumbel import gumbel
from heads.kernels.slots import PrefillSlots, TreeSlots, VisibleSlots, ancestors, bits
from heads.kernels.tree_attention import for_groups, masked_attention, tree_attention
from heads.targets.masks import additive
from tests.support.switches import kernels_on_cpu

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs")


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    torch.manual_seed(0)
    with kernels_on_cpu():
        yield


def random_tree(B: int, N: int) -> tuple[Tensor, Tensor]:
    """Parents and depths of trees in which every node hangs on any earlier one."""
    parents, depths = torch.zeros(2, B, N, dtype=torch.int64)
    for b in range(B):
        for j in range(1, N):
            parents[b, j] = torch.randint(j, ())
            depths[b, j] = depths[b, parents[b, j]] + 1
    return parents, depths


def seen_by(parents: Tensor, depths: Tensor, length: Tensor) -> VisibleSlots:
    return VisibleSlots(length, bits(ancestors(parents, parents.shape[1])), depths, parents.shape[1])


def expected_attention(
    q: Tensor, keys: Tensor, values: Tensor, tree: TreeSlots | PrefillSlots, window: int | None
) -> Tensor:
    """Return the attention of a tree's nodes by torch, in float64."""
    visible: Any = tree.visible(0, keys.shape[1])
    if window is not None:
        visible &= tree.positions[..., None] - tree.key_positions(keys.shape[1])[:, None] < window
    mask = for_groups(additive(visible, torch.float64)[:, 0], q.shape[2] // keys.shape[2])
    k, v = (torch.nan_to_num(x.double(), nan=0.0) for x in (keys, values))
    return masked_attention(q.double(), k, v, mask)


@pytest.mark.filterwarnings("ignore:(All-NaN|invalid value)")  # by the interpreter's numpy
@pytest.mark.parametrize(
    ("B", "N", "heads", "d", "S", "window"),
    [
        (2, 5, (4, 2), 16, 150, None),  # grouped queries
        (1, 1, (3, 3), 16, 150, None),  # plain decoding, a key head for each query head
        (3, 9, (5, 1), 24, 150, None),  # one key head; a width that is no power of two
        (1, 70, (2, 1), 16, 150, None),  # two words of ancestors
        (2, 12, (4, 2), 16, 150, 6),
        (2, 3, (1, 1), 16, 1100, None),  # short splits and long ones, two chunks of them in one row
    ],
)
def test_tree_attention(B: int, N: int, heads: tuple[int, int], d: int, S: int, window: int | None) -> None:
    """Twice by the same counters, the second time with the programs in the opposite order: whichever merges the splits,
    the bits are the same. A query that is not a number spoils its own row alone."""
    H, Hkv = heads
    parents, depths = random_tree(B, N)
    q, (keys, values) = torch.randn(B, N, H, d), torch.randn(2, B, S, Hkv, d)
    length = torch.randint(S - N + 1, (B,))
    length[0] = S - N  # a full cache
    for b in range(B):
        keys[b, length[b] + N :] = torch.nan  # what is past the tree is never read
    visible = seen_by(parents, depths, length)
    out = tree_attention(q, keys, values, visible, window=window)
    with backwards():
        again = tree_attention(q, keys, values, visible, window=window)
    assert visible.counters is not None and not visible.counters.any() and torch.equal(again, out)
    broken = q.clone()
    broken[0, N - 1, 0, 0] = torch.nan
    spoilt = tree_attention(broken, keys, values, visible, window=window)
    assert spoilt[0, N - 1, 0].isnan().all()
    spoilt[0, N - 1, 0] = out[0, N - 1, 0]
    assert torch.equal(spoilt, out)
    tree = TreeSlots(length, parents, depths, ancestors(parents, N), torch.arange(S))
    expected = expected_attention(q, keys, values, tree, window)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_chunks_of_several_prompts_see_what_their_masks_say(window: int | None) -> None:
    starts = torch.tensor([0, 20, 3])
    chunks = PrefillSlots(starts, None, torch.arange(101), 9)
    q, (keys, values) = torch.randn(3, 9, 4, 16), torch.randn(2, 3, 100, 2, 16)
    out = tree_attention(q, keys, values, chunks.visible_slots(), window=window)
    expected = expected_attention(q, keys, values, chunks, window)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)


@contextmanager
def backwards() -> Iterator[None]:
    """Have the interpreter run a kernel's programs last to first."""
    from triton.runtime.interpreter import interpreter_builder

    forwards = interpreter_builder.set_grid_idx

    def set_grid_idx(*place: int) -> None:
        forwards(*(size - 1 - i for size, i in zip(interpreter_builder.grid_dim, place, strict=True)))

    interpreter_builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        interpreter_builder.set_grid_idx = forwards


@pytest.mark.parametrize(("length", "P"), [(61, 40), (10, 100), (70, 130)])
def test_slots_that_no_query_sees_may_hold_anything(length: int, P: int) -> None:
    """Of slots behind the length some were never written in this round; zero times what is not a number is none."""
    S, N = 220, 4
    seen = torch.zeros(1, N, P, dtype=torch.bool)
    for i in range(N):
        seen[0, i, torch.randperm(P)[:3]] = True
    q, cache = torch.randn(1, N, 4, 16), torch.randn(2, 1, S, 2, 16)
    visible = VisibleSlots(torch.tensor([length]), bits(seen), torch.zeros(1, N, dtype=torch.int64), P)
    clean = tree_attention(q, cache[0], cache[1], visible)
    cache[:, :, length : length + P][:, :, ~seen[0].any(0)] = torch.nan
    cache[:, :, length + P :] = torch.nan
    assert torch.equal(tree_attention(q, cache[0], cache[1], visible), clean)


@pytest.mark.parametrize("start", [62, 1022])
def test_a_node_of_a_chain_gets_what_plain_decoding_gives_it(start: int) -> None:
    """Bit for bit, where a split ends within the chain, and where a chunk of splits does."""
    depths = torch.arange(3)[None]
    parents = (depths - 1).clamp_min(0)
    q, (keys, values) = torch.randn(1, 3, 2, 16), torch.randn(2, 1, start + 64, 1, 16)
    chain = tree_attention(q, keys, values, seen_by(parents, depths, torch.tensor([start])))
    for j in (0, 2):
        visible = seen_by(parents, depths, torch.tensor([start + j]))
        alone = tree_attention(q[:, [j] * 3].contiguous(), keys, values, visible)
        assert torch.equal(alone[:, 0], chain[:, j])


def choose_twin(
    hidden: Tensor, weight: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, noisy: bool
) -> Tensor:
    logits = hidden.float() @ weight.float().T  # (M, V)
    if not noisy:
        return logits.argmax(-1)
    row = torch.arange(len(hidden), device=hidden.device) // (len(hidden) // len(seeds))
    temperature, seeds = temperature[row], seeds[row]
    hot = (temperature > 0)[:, None]
    noise = gumbel(seeds, positions[:, None], torch.arange(len(weight), device=hidden.device))[:, 0]
    return torch.where(hot, logits / torch.where(hot, temperature[:, None], 1.0) + noise, logits).argmax(-1)


@pytest.mark.parametrize(("B", "N", "D", "V"), [(1, 1, 16, 70), (7, 1, 48, 333), (20, 1, 40, 64), (3, 4, 16, 50)])
@pytest.mark.parametrize("noisy", [False, True])
def test_choose(B: int, N: int, D: int, V: int, noisy: bool) -> None:
    """A row of the batch lends its sampling to all its nodes."""
    hidden, weight = torch.randint(-4, 5, (B * N, D)).float(), torch.randint(-4, 5, (V, D)).float()  # sums are exact
    weight[V // 2] = weight[3]  # ties go to the lowest id
    weight[3, :2] = weight[V // 2, :2] = 9
    hidden[0] = 5 * weight[3]
    temperature = torch.where(torch.arange(B) % 3 == 0, 0.0, 4.0) if noisy else torch.zeros(B)
    seeds, positions = torch.randint(-(2**62), 2**62, (B,)), torch.randint(5000, (B * N,))
    found = choose_in_tiles(hidden, weight, temperature, seeds, positions, noisy=noisy)
    assert found.tolist() == choose_twin(hidden, weight, temperature, seeds, positions, noisy=noisy).tolist()
    assert found[0] == 3 and torch.equal(logits_in_tiles(hidden, weight), hidden @ weight.T)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter's numpy
@pytest.mark.parametrize("noisy", [False, True])
def test_choose_gives_an_id_whatever_the_scores(noisy: bool) -> None:
    """Rows of numbers, of none, of one and of none below infinity; the ids decide what is read next."""
    hidden, weight = torch.ones(4, 16), torch.randn(150, 16)
    hidden[1], hidden[2], hidden[3] = torch.nan, torch.tensor([0.0] * 15 + [1.0]), -torch.inf
    weight[100, 15], weight[140, 15] = torch.nan, torch.nan
    weight[:, :15] = weight[:, :15].abs()
    weight[:, 15] = torch.where(weight[:, 15].isnan(), torch.nan, weight[:, 15].abs())
    given = hidden, weight, torch.full((4,), 0.7 * noisy), torch.arange(4), torch.arange(4)
    found = choose_in_tiles(*given, noisy=noisy).tolist()
    assert found == choose_twin(*given, noisy=noisy).tolist()
    assert found[1:] == [0, 100, 100]
