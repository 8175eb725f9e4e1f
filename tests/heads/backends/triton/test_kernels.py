"""Kernels in Triton's interpreter against their twins in torch, over random shapes, ragged lengths and full caches."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.backends.slot_mapping import ancestors
from heads.backends.torch.accept import match, match_chain
from heads.backends.torch.accept import take_path as take_path_twin
from heads.backends.triton.accept import match as accept
from heads.backends.triton.accept import take_path
from heads.backends.triton.attention import ancestor_words, new_counters, tree_attention
from heads.backends.triton.choose import choose, logits
from heads.backends.triton.compaction import compact
from heads.backends.triton.experts import expert_mm, weigh_visits
from heads.backends.triton.gemm import TILES, add_parts, parts_of, skinny_mm, skinny_parts
from heads.backends.triton.layers import add_norm, rope_write, silu_mul
from heads.backends.triton.per_head import per_head_mm
from heads.backends.triton.products import Products, shape_of
from heads.tree import Acceptance, Proposal
from tests.closeness import assert_close
from tests.twins import (
    add_norm_twin,
    add_parts_twin,
    ancestor_words_twin,
    choose_twin,
    compact_twin,
    expert_mm_twin,
    pack_bits,
    per_head_mm_twin,
    rope_write_twin,
    silu_mul_twin,
    tree_attention_twin,
    weigh_visits_twin,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite runs the kernels themselves")


@pytest.fixture(autouse=True)
def seeded(interpreted: None) -> None:
    torch.manual_seed(0)


def random_tree(B: int, N: int) -> tuple[Tensor, Tensor]:
    """Parents and depths of trees in which every node hangs on any earlier one."""
    parents, depths = torch.zeros(2, B, N, dtype=torch.int64)
    for b in range(B):
        for j in range(1, N):
            parents[b, j] = torch.randint(j, ())
            depths[b, j] = depths[b, parents[b, j]] + 1
    return parents, depths


@pytest.mark.filterwarnings("ignore:(All-NaN|invalid value)")  # by the interpreter's numpy
@pytest.mark.parametrize(
    ("B", "N", "heads", "widths", "S", "options"),
    [
        (2, 5, (4, 2), (16, 16), 150, {}),  # grouped queries
        (1, 1, (3, 3), (16, 16), 150, {}),  # plain decoding, a key head for each query head
        (3, 9, (5, 1), (24, 24), 150, {}),  # one key head; widths that are no powers of two
        (1, 70, (2, 1), (16, 16), 150, {}),  # two words of ancestors
        (2, 6, (4, 1), (48, 32), 150, {"rope": 16}),  # latent attention: values are the keys' first columns
        (2, 12, (4, 2), (16, 16), 150, {"window": 6}),
        (2, 3, (2, 1), (16, 16), 1500, {}),  # short splits and long ones, two chunks of them in one row
    ],
)
def test_tree_attention(
    B: int, N: int, heads: tuple[int, int], widths: tuple[int, int], S: int, options: dict[str, Any]
) -> None:
    """Twice by the same counters, the second time with the programs in the opposite order: whichever merges the splits,
    the bits are the same. A query that is not a number spoils its own row alone."""

    (H, Hkv), (d, dv) = heads, widths
    parents, depths = random_tree(B, N)
    words = pack_bits(ancestors(parents, N))
    q, keys = torch.randn(B, N, H, d), torch.randn(B, S, Hkv, d)
    values = keys[..., :dv] if "rope" in options else torch.randn(B, S, Hkv, dv)
    length = torch.randint(S - N + 1, (B,))
    length[0] = S - N  # a full cache
    for b in range(B):
        keys[b, length[b] + N :] = torch.nan if "rope" not in options else 1e30  # what is past the tree is never read
    counters = new_counters(B * N, H, S, q.device)
    out = tree_attention(q, keys, values, words, length, depths, counters=counters, **options)
    with backwards():
        again = tree_attention(q, keys, values, words, length, depths, counters=counters, **options)
    assert torch.equal(again, out) and not counters.any()
    broken = q.clone()
    broken[0, N - 1, 0, 0] = torch.nan
    spoilt = tree_attention(broken, keys, values, words, length, depths, counters=counters, **options)
    assert spoilt[0, N - 1, 0].isnan().all()
    spoilt[0, N - 1, 0] = out[0, N - 1, 0]
    assert torch.equal(spoilt, out)
    options.pop("rope", None)
    k, v = (torch.nan_to_num(x.double(), nan=0.0) for x in (keys, values))
    expected = tree_attention_twin(q.double(), k, v, words, length, depths, scale=d**-0.5, **options)
    assert_close(out, expected)


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
    words = pack_bits(torch.nn.functional.pad(seen, (0, 0, 0, P - N)))[:, :N]
    q, cache = torch.randn(1, N, 4, 16), torch.randn(2, 1, S, 2, 16)
    keys, values = cache
    at = torch.tensor([length])
    clean = tree_attention(q, keys, values, words, at, None, behind=P)
    cache[:, :, length : length + P][:, :, ~seen[0].any(0)] = torch.nan
    cache[:, :, length + P :] = torch.nan
    assert torch.equal(tree_attention(q, keys, values, words, at, None, behind=P), clean)


def test_the_twin_is_softmax_over_the_path() -> None:
    """Node 4 of a tree sees the cache, its ancestors and itself: as if its path had been decoded plainly."""

    parents, depths = torch.tensor([[0, 0, 0, 2, 3]]), torch.tensor([[0, 1, 1, 2, 3]])
    q, keys, values = torch.randn(1, 5, 2, 8), torch.randn(1, 12, 1, 8), torch.randn(1, 12, 1, 8)
    words = pack_bits(ancestors(parents, 3))
    out = tree_attention_twin(q, keys, values, words, torch.tensor([6]), depths, scale=0.3)
    seen = [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]
    weights = (0.3 * q[0, 4] @ keys[0, seen, 0].T).softmax(-1)
    torch.testing.assert_close(out[0, 4], weights @ values[0, seen, 0])


@pytest.mark.parametrize(("M", "D", "V"), [(1, 16, 70), (7, 48, 333), (20, 40, 64)])
@pytest.mark.parametrize("noisy", [False, True])
def test_choose(M: int, D: int, V: int, noisy: bool) -> None:
    hidden, weight = torch.randint(-4, 5, (M, D)).float(), torch.randint(-4, 5, (V, D)).float()  # sums are exact
    weight[V // 2] = weight[3]  # ties go to the lowest id
    weight[3, :2] = weight[V // 2, :2] = 9
    hidden[0] = 5 * weight[3]
    temperature = torch.where(torch.arange(M) % 3 == 0, 0.0, 0.7) if noisy else torch.zeros(M)
    seeds, positions = torch.randint(-(2**62), 2**62, (M,)), torch.randint(5000, (M,))
    found = choose(hidden, weight, temperature, seeds, positions, noisy=noisy)
    assert found.tolist() == choose_twin(hidden, weight, temperature, seeds, positions, noisy=noisy).tolist()
    assert found[0] == 3


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
    found = choose(*given, noisy=noisy).tolist()
    assert found == choose_twin(*given, noisy=noisy).tolist()
    assert found[1:] == [0, 100, 100]


@pytest.mark.parametrize(("B", "N"), [(1, 5), (3, 4)])
def test_a_row_of_the_batch_lends_its_sampling_to_all_its_nodes(B: int, N: int) -> None:
    hidden, weight = torch.randint(-2, 3, (B * N, 16)).float(), torch.randint(-2, 3, (50, 16)).float()
    temperature, seeds = torch.rand(B) + 4, torch.arange(B) + 11
    positions = torch.randint(5000, (B, N)).flatten()
    found = choose(hidden, weight, temperature, seeds, positions, noisy=True)
    assert found.tolist() == choose_twin(hidden, weight, temperature, seeds, positions, noisy=True).tolist()
    alone = [
        choose_twin(hidden[[m]], weight, temperature[[m // N]], seeds[[m // N]], positions[[m]], noisy=True)
        for m in range(B * N)
    ]
    assert found.tolist() == torch.cat(alone).tolist()


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("M", "D"), [(1, 16), (5, 48)])
def test_add_norm(M: int, D: int, adds: bool) -> None:
    residual, x, weight = torch.randn(M, D), torch.randn(M, D) if adds else None, torch.rand(D)
    ours, theirs = residual.clone(), residual.clone()
    torch.testing.assert_close(add_norm(ours, x, weight, 1e-6), add_norm_twin(theirs, x, weight, 1e-6))
    assert torch.equal(ours, theirs) and torch.equal(ours, residual if x is None else residual + x)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "d"), [((6, 2), 24), ((1, 1), 8)])
def test_rope_write(heads: tuple[int, int], d: int, normed: bool) -> None:
    (H, Hkv), M = heads, 4
    qkv, (cos, sin) = torch.randn(M, (H + 2 * Hkv) * d), torch.randn(2, M, d // 2)
    slots = torch.tensor([3, 1, 9, 0])
    norms: dict[str, Any] = {"q_norm": torch.rand(d), "k_norm": torch.rand(d)} if normed else {}
    caches = [torch.zeros(2, 10, Hkv, d) for _ in range(2)]
    ours = rope_write(qkv, cos, sin, slots, *caches[0], num_heads=H, **norms)
    theirs = rope_write_twin(qkv, cos, sin, slots, *caches[1], num_heads=H, **norms)
    assert_close(ours, theirs)
    assert_close(caches[0], caches[1])
    assert int((caches[0][1].abs().sum((1, 2)) > 0).sum()) == M


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(("M", "K", "I", "dtype"), [
    (1, 40, 70, torch.float32), (17, 130, 1500, torch.bfloat16), (5, 2100, 96, torch.bfloat16),
])  # fmt: skip
def test_gates(M: int, K: int, I: int, dtype: torch.dtype) -> None:  # noqa: E741
    """In the end of their product, or where its parts are added, of sums that are exact; a row that is not a number
    stays alone."""

    x, weight = torch.randint(-2, 3, (M, K)).to(dtype), torch.randint(-4, 5, (2 * I, K)).to(dtype) / 64
    x[M // 2, 3] = torch.nan if M > 1 else 0.5
    expected = silu_mul_twin((x.float() @ weight.float().T).to(dtype))
    for tile in TILES:
        products = Products({M: {shape_of(weight): str(tile)}})
        made = products.gated(x, weight)
        torch.testing.assert_close(made, expected, equal_nan=True, rtol=3e-2, atol=1e-5)  # gates rounded another way
        assert made.isnan().all(1).tolist() == [M > 1 and m == M // 2 for m in range(M)]
        assert torch.equal(products.gated(x[[0] * M], weight)[M - 1], made[0])
    fused = (x.float() @ weight.float().T).to(dtype)
    torch.testing.assert_close(silu_mul(fused), expected, equal_nan=True, rtol=3e-2, atol=1e-5)


@pytest.mark.parametrize(("M", "K", "N"), [(1, 40, 70), (17, 2100, 65), (64, 128, 10)])
def test_skinny_mm(M: int, K: int, N: int) -> None:
    x, weight = torch.randn(M, K), torch.randn(N, K)
    for tile in TILES:
        made = skinny_mm(x, weight, tile)
        assert_close(made, x.double() @ weight.double().T, roundings=16)
        assert parts_of(4096, 4096, tile) > 1 and parts_of(28672, 4096, tile) == 1


def test_products_of_bfloat16() -> None:
    """Each number rounded once: the interpreter, too, takes bfloat16 for what it is."""

    x, weight = torch.randn(5, 130).bfloat16(), torch.randn(33, 130).bfloat16()
    expected = x.double() @ weight.double().T
    for made in (skinny_mm(x, weight), per_head_mm(x[:, None], weight.T[None].contiguous())[:, 0]):
        torch.testing.assert_close(made.double(), expected, atol=1e-2, rtol=2**-7)


def test_a_row_of_a_product_depends_on_nothing_else() -> None:
    x, weight = torch.randn(16, 1100), torch.randn(65, 1100)
    alike = x[3:4].expand(16, -1).contiguous()
    for tile in TILES:
        assert torch.equal(skinny_mm(alike, weight, tile)[7], skinny_mm(x, weight, tile)[3])


def random_round(B: int, N: int, V: int) -> tuple[Proposal, Tensor]:
    """A tree over a small vocabulary, with duplicate siblings, and choices that often follow it."""
    parents, depths = random_tree(B, N)
    tokens = torch.randint(V, (B, N))
    return Proposal(tokens, parents, depths, torch.zeros(B, N)), torch.randint(V, (B, N))


@pytest.mark.parametrize(("B", "N", "V"), [(1, 1, 2), (4, 9, 2), (3, 33, 2), (5, 12, 1)])
def test_accept(B: int, N: int, V: int) -> None:
    for _ in range(3):
        proposal, choice = random_round(B, N, V)
        K = int(proposal.depths.max()) + 1
        ours, theirs = accept(proposal, choice, None, K), match(proposal, choice, ancestors(proposal.parents, K), K)
        assert kept(ours) == kept(theirs)


def test_accept_takes_chains_and_trees_that_all_rows_share() -> None:
    B, N = 4, 6
    node = torch.arange(N).expand(B, N)
    tokens, choice = torch.randint(2, (2, B, 2 * N))  # some columns are taken: rows stand apart
    chain = Proposal(tokens[:, :N], (node - 1).clamp_min(0), node, torch.zeros(B, N))
    assert kept(accept(chain, choice[:, :N], None, N - 1)) == kept(match_chain(tokens[:, :N], choice[:, :N]))
    parents, depths = random_tree(1, N)
    shared = Proposal(tokens[:, :N], parents.expand(B, N), depths.expand(B, N), torch.zeros(B, N))
    assert kept(accept(shared, choice[:, :N], None, N)) == kept(
        match(shared, choice[:, :N], ancestors(shared.parents, N), N)
    )


def kept(acceptance: Acceptance) -> list[tuple[int, list[int], list[int]]]:
    return [
        (n, path[: n + 1], emitted[: n + 1])
        for n, path, emitted in zip(
            acceptance.accepted.tolist(), acceptance.path.tolist(), acceptance.emitted.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize(("N", "X"), [(20, 6), (2, 6), (60, 1500)])
def test_compact(N: int, X: int) -> None:
    """Nothing else in the cache changes either."""

    proposal, choice = random_round(3, N, 1)  # one token: the deepest path is always taken
    K = int(proposal.depths.max())
    acceptance = accept(proposal, choice, None, K)
    assert int(acceptance.accepted.max()) == K
    ours = torch.randn(4, 3, N + 20, X)
    theirs, length = ours.clone(), torch.tensor([0, 7, 20])
    compact(ours, length, acceptance.path, acceptance.accepted)
    compact_twin(theirs, length, acceptance.path, acceptance.accepted)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("X", "D"), [(0, 24), (72, 24), (5000, 2048), (3, 2100)])
def test_take_path(X: int, D: int) -> None:
    aux_hidden_states, hidden, path = torch.randn(2, 9, X), torch.randn(2, 9, D), torch.randint(9, (2, 4))
    for ours, theirs in zip(
        take_path(aux_hidden_states, hidden, path), take_path_twin(aux_hidden_states, hidden, path), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("B", "N"), [(1, 1), (3, 7), (2, 70)])
def test_ancestor_words(B: int, N: int) -> None:
    parents, depths = random_tree(B, N)
    K = int(depths.max()) + 1
    words, paths = ancestor_words(parents, depths, K)
    expected = ancestor_words_twin(parents, depths, K)
    assert torch.equal(words, expected[0]) and torch.equal(words, pack_bits(ancestors(parents, K)))
    assert torch.equal(paths, expected[1])
    for b in range(B):
        for j in range(N):
            path = paths[b, j, : depths[b, j] + 1].tolist()
            assert path[0] == 0 and path[-1] == j
            assert all(int(parents[b, child]) == parent for parent, child in pairwise(path))


@pytest.mark.parametrize("window", [0, 5])
def test_by_its_own_path_a_node_is_bit_for_bit_what_a_chain_gives(window: int) -> None:
    """A tree's node 4, over slots 0, 2, 3, 4 of the tree, against node 3 of the chain that its path is."""

    parents, length = torch.tensor([[0, 0, 0, 2, 3, 1]]), torch.tensor([61])  # the tree lies across two tiles
    depths = torch.tensor([[0, 1, 1, 2, 3, 2]])
    q, keys, values = torch.randn(1, 6, 4, 16), torch.randn(1, 90, 2, 16), torch.randn(1, 90, 2, 16)
    words, paths = ancestor_words(parents, depths, 3)
    options: dict[str, Any] = {"window": window}
    tree = tree_attention(q, keys, values, words, length, depths, paths=paths, **options)
    torch.testing.assert_close(tree, tree_attention(q, keys, values, words, length, depths, **options))
    chain_depths = torch.arange(6)[None]
    words, paths = ancestor_words((chain_depths - 1).clamp_min(0), chain_depths, 5)
    order = [0, 2, 3, 4, 1, 5]
    for cache in (keys, values):
        cache[:, 61:67] = cache[:, 61:67][:, order]
    chain = tree_attention(q[:, order], keys, values, words, length, chain_depths, paths=paths, **options)
    assert torch.equal(chain[:, 3], tree[:, 4])


@pytest.mark.parametrize("start", [62, 1022])
def test_a_node_of_a_chain_gets_what_plain_decoding_gives_it(start: int) -> None:
    """Bit for bit, where a split ends within the chain, and where a chunk of splits does."""

    depths, length = torch.arange(3)[None], torch.tensor([start])
    words, _ = ancestor_words((depths - 1).clamp_min(0), depths, 2)
    q, keys, values = torch.randn(1, 3, 4, 16), torch.randn(1, 1100, 2, 16), torch.randn(1, 1100, 2, 16)
    chain = tree_attention(q, keys, values, words, length, depths)
    for j in range(3):
        alone = tree_attention(q[:, [j] * 3].contiguous(), keys, values, words, length + j, depths)
        assert torch.equal(alone[:, 0], chain[:, j])


def test_logits_are_what_the_choice_compares() -> None:
    hidden, weight = torch.randn(5, 40), torch.randn(100, 40)
    made = logits(hidden, weight)
    assert_close(made, hidden @ weight.T, roundings=16)
    none = torch.zeros(5, dtype=torch.int64)
    assert torch.equal(made.argmax(-1), choose(hidden, weight, none.float(), none, none, noisy=False))


@pytest.mark.parametrize(("M", "A", "X", "K", "N"), [(1, 2, 4, 40, 70), (9, 3, 5, 130, 65)])
@pytest.mark.parametrize("by_visit", [False, True])
def test_expert_mm(M: int, A: int, X: int, K: int, N: int, by_visit: bool) -> None:
    ids = torch.stack([torch.randperm(X)[:A] for _ in range(M)])
    x, weight = torch.randn(M, A, K) if by_visit else torch.randn(M, K), torch.randn(X, N, K)
    found = expert_mm(x, ids, weight)
    assert_close(found, expert_mm_twin(x, ids, weight))
    row = x[M - 1, A - 1] if by_visit else x[M - 1]
    assert_close(found[M - 1, A - 1], weight[ids[M - 1, A - 1]] @ row)


@pytest.mark.parametrize(("M", "A", "N"), [(1, 1, 5), (7, 3, 1100)])
@pytest.mark.parametrize("adds", [False, True])
def test_weigh_visits(M: int, A: int, N: int, adds: bool) -> None:
    visits, weights, added = torch.randn(M, A, N), torch.rand(M, A), torch.randn(M, N) if adds else None
    torch.testing.assert_close(weigh_visits(visits, weights, added), weigh_visits_twin(visits, weights, added))
    order = torch.randperm(M)
    shuffled = weigh_visits(visits[order], weights[order], None if added is None else added[order])
    assert torch.equal(shuffled, weigh_visits(visits, weights, added)[order])


@pytest.mark.parametrize(("M", "H", "K", "N"), [(1, 3, 16, 40), (9, 2, 200, 70), (70, 1, 24, 16)])
def test_per_head_mm(M: int, H: int, K: int, N: int) -> None:
    """From and into parts of wider tensors, and by weights that lie either way, as latent attention has them."""

    x, wide = torch.randn(M, H, K + 5)[..., :K], torch.zeros(M, H, N + 3)
    for weight in (torch.randn(H, K, N), torch.randn(H, N, K).mT):
        expected = per_head_mm_twin(x.double(), weight.double())
        assert_close(per_head_mm(x, weight), expected, roundings=16)
        per_head_mm(x, weight, wide[..., 2:-1])
        assert_close(wide[..., 2:-1], expected, roundings=16)
        assert not wide[..., :2].any() and not wide[..., -1].any()


def test_parts_of_a_product_are_added_where_they_are_read() -> None:
    """Bit for bit what the whole product gives."""

    x, weight, residual, norm = torch.randn(3, 2100), torch.randn(64, 2100), torch.randn(3, 64), torch.rand(64)
    parts = skinny_parts(x, weight, TILES[0])
    whole = add_parts(parts, x.dtype)
    assert parts.dim() == 3 and torch.equal(whole, add_parts_twin(parts, x.dtype))
    streams = [residual.clone(), residual.clone()]
    normed = [add_norm(stream, y, norm, 1e-6) for stream, y in zip(streams, (parts, whole), strict=True)]
    assert torch.equal(*normed) and torch.equal(*streams)
    (cos, sin), slots = torch.randn(2, 3, 8), torch.tensor([3, 1, 9])
    caches = torch.zeros(2, 2, 10, 1, 16)
    queries = [rope_write(y, cos, sin, slots, *c, num_heads=2) for c, y in zip(caches, (parts, whole), strict=True)]
    assert torch.equal(*queries) and torch.equal(*caches) and caches.any()
