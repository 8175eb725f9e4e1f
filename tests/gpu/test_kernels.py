"""Kernels against their twins in float32, where the sums differ in order alone."""

from dataclasses import fields
from functools import partial

import pytest
import torch
from torch import Tensor

from eval.runtime.sampling import Sampling
from heads.backends.selection import TORCH, TRITON
from heads.backends.slot_mapping import ancestors
from heads.backends.torch.accept import match, take_path
from heads.backends.torch.commit import Commit, RoundState
from heads.backends.torch.sampling import RowSampling
from heads.backends.triton import accept, attention, choose, compaction, experts, gemm, layers, per_head
from heads.backends.triton.commit import TritonCommit
from heads.backends.triton.pick import TritonSampling
from heads.tree import Proposal, parse_shape
from scripts.gpu.kernels import grow_from
from tests.twins import (
    add_norm_twin,
    ancestor_words_twin,
    choose_twin,
    compact_twin,
    expert_mm_twin,
    per_head_mm_twin,
    silu_mul_twin,
    tree_attention_twin,
    weigh_visits_twin,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


def normals(draw: torch.Generator, device: torch.device, *size: int) -> Tensor:
    return torch.randn(*size, generator=draw).to(device)


def integers(draw: torch.Generator, device: torch.device, low: int, high: int, *size: int) -> Tensor:
    return torch.randint(low, high, size, generator=draw).to(device)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("N", "H", "Hkv", "d"), [(1, 8, 2, 64), (7, 4, 4, 128), (33, 8, 1, 64), (64, 8, 2, 128)])
def test_attention_and_acceptance(N: int, H: int, Hkv: int, d: int, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    random = partial(normals, draw, device)
    parents = torch.tensor([[0, *(int(torch.randint(j, (), generator=draw)) for j in range(1, N))]] * 2).to(device)
    depths = torch.zeros_like(parents)
    for j in range(1, N):
        depths[:, j] = depths.gather(1, parents[:, j : j + 1])[:, 0] + 1
    words, paths = attention.ancestor_words(parents, depths, N)
    twins = ancestor_words_twin(parents, depths, N)
    assert torch.equal(words, twins[0]) and torch.equal(paths, twins[1])
    q, keys, values = random(2, N, H, d), random(2, 700, Hkv, d), random(2, 700, Hkv, d)
    length = torch.tensor([3, 700 - N], device=device)
    expected = tree_attention_twin(q, keys, values, words, length, depths, scale=d**-0.5)
    for own in (None, paths):
        close(attention.tree_attention(q, keys, values, words, length, depths, paths=own), expected)
    proposal = Proposal(integers(draw, device, 0, 2, 2, N), parents, depths, depths)
    choice = integers(draw, device, 0, 2, 2, N)
    ours, theirs = accept.match(proposal, choice, None, N), match(proposal, choice, ancestors(parents, N), N)
    assert torch.equal(ours.accepted, theirs.accepted)
    for b, n in enumerate(ours.accepted.tolist()):
        assert torch.equal(ours.path[b, : n + 1], theirs.path[b, : n + 1])
        assert torch.equal(ours.emitted[b, : n + 1], theirs.emitted[b, : n + 1])


@pytest.mark.parametrize(("M", "K", "N"), [(1, 512, 300), (9, 4096, 1024), (64, 1100, 333)])
def test_products_choice_and_layers(M: int, K: int, N: int, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    random = partial(normals, draw, device)
    x, weight = random(M, K), random(N, K)
    for tile in gemm.TILES:
        close(gemm.skinny_mm(x, weight, tile), (x.double() @ weight.double().T).float(), 1e-3)
    positions = torch.arange(M, device=device)
    temperature = torch.where(positions % 2 == 0, 0.0, 0.8)
    for noisy in (False, True):
        found = choose.choose(x, weight, temperature, positions * 7, positions, noisy=noisy)
        same = found == choose_twin(x, weight, temperature, positions * 7, positions, noisy=noisy)
        assert float(same.float().mean()) > 0.95, "choices differ"
    gate, stream = random(M, 2 * K), random(M, K)
    close(layers.silu_mul(gate), silu_mul_twin(gate))
    close(layers.add_norm(stream.clone(), x, weight[0], 1e-5), add_norm_twin(stream, x, weight[0], 1e-5))
    ids = torch.stack([torch.randperm(6, generator=draw)[:2] for _ in range(M)]).to(device)
    bank, visits, weights = random(6, 130, K), random(M, 3, K), random(M, 3)
    close(experts.expert_mm(x, ids, bank), expert_mm_twin(x, ids, bank), 1e-3)
    close(experts.weigh_visits(visits, weights, x), weigh_visits_twin(visits, weights, x))
    by_head, own = random(M, 4, 192)[..., :128], random(4, 256, 128)
    for weight in (own.mT, random(4, 128, 256)):
        close(per_head.per_head_mm(by_head, weight), per_head_mm_twin(by_head, weight), 1e-3)


def test_states(device: torch.device) -> None:
    """Commits of rounds into random states."""
    draw = torch.Generator().manual_seed(0)
    random = partial(integers, draw, device)
    B = 64
    for depth, eos in ((0, [3]), (4, []), (7, [2, 5, 8])):
        ours = RoundState.new(batch_size=B, capacity=60, depth=depth, device=device, rounds=3)
        for name, low, high in (("length", 1, 20), ("root", 0, 9), ("output_length", 1, 50), ("rounds", 0, 20)):
            getattr(ours, name).copy_(random(low, high, B))
        ours.limit.copy_(ours.output_length + random(1, 9, B))
        ours.done.copy_(random(0, 4, B) == 0)
        ours.stops_at_eos.copy_(random(0, 2, B) == 0)
        theirs = RoundState(**{field.name: getattr(ours, field.name).clone() for field in fields(ours)})
        shared = torch.tensor(eos, dtype=torch.int64, device=device)
        by_kernel, in_tensors = TritonCommit(ours, shared, depth), Commit(theirs, shared, depth)
        for _ in range(5):
            outcome = random(0, depth + 1, B), random(0, 9, B, depth + 1), random(0, depth + 1, B, 9)
            for one, two in ((by_kernel(*outcome), in_tensors(*outcome)), (ours, theirs)):
                for field in fields(one):
                    assert torch.equal(getattr(one, field.name), getattr(two, field.name)), (depth, field.name)


def test_paths(device: torch.device) -> None:
    """Caches compacted and features taken along accepted paths."""
    draw = torch.Generator().manual_seed(0)
    random = partial(integers, draw, device)
    B = 64
    for K, N, X in ((3, 8, 100), (7, 40, 2048)):
        path = random(0, N, B, K + 1)
        aux_hidden_states, hidden = (torch.randn(B, N, width, generator=draw).to(device) for width in (3 * X, X))
        for own, twin in zip(
            accept.take_path(aux_hidden_states, hidden, path),
            take_path(aux_hidden_states, hidden, path),
            strict=True,
        ):
            assert torch.equal(own, twin)
        nodes = torch.rand(B, N - 1, generator=draw).argsort(1)[:, :K].sort(1).values + 1
        ascending = torch.cat([torch.zeros_like(path[:, :1]), nodes.to(device)], dim=1)
        cache = torch.randn(5, B, N + 30, X, generator=draw).to(device)
        length, accepted, other = random(0, 30, B), random(0, K + 1, B), cache.clone()
        compaction.compact(cache, length, ascending, accepted)
        compact_twin(other, length, ascending, accepted)
        assert torch.equal(cache, other), (K, N, X)


def test_trees_grow_as_on_a_cpu(device: torch.device) -> None:
    """Bit for bit, of several sizes, also over distributions that tie and such as are no numbers."""
    draw = torch.Generator().manual_seed(0)
    for text in ("tree:6x8x32", "tree:8x10x60", "tree:3x13x300", "tree:1x5x4", "static:3.2.1", "static:9.9.9"):
        shape = parse_shape(text)
        for kind in ("random", "flat", "broken"):
            distributions = torch.randn(shape.depth, 3, shape.nodes, 16, generator=draw).log_softmax(-1)
            distributions = distributions.sort(dim=-1, descending=True).values
            if kind == "flat":
                distributions.zero_()
            if kind == "broken":
                distributions[:, 0, 1] = torch.nan
            ours = vars(grow_from(shape, distributions.to(device), TRITON.select))
            theirs = vars(grow_from(shape, distributions, TORCH.select))
            for name, found in ours.items():
                same = found is None or torch.equal(found.cpu().nan_to_num(), theirs[name].nan_to_num())
                assert same, f"{name} of {text} of {kind} distributions"


def test_picks_are_those_of_tensor_operations(device: torch.device) -> None:
    """Greedy rows beside sampled ones, over a vocabulary and a part of one, from levels of several widths."""
    draw = torch.Generator().manual_seed(0)
    rows, twin = TritonSampling(3, device), RowSampling(3, device)
    for row, sampling in enumerate((Sampling(), Sampling(0.7, seed=-5), Sampling(1.2, seed=2**60))):
        rows.set_row(row, sampling)
        twin.set_row(row, sampling)
    for W, V, count in ((1, 32000, 1), (8, 5000, 8), (10, 32000, 10), (20, 700, 3)):
        logits = 3 * torch.randn(3, W, V, generator=draw).to(device)
        logits[:, :, V // 2 + 9 : V // 2 + 1200] = -torch.inf
        ids = torch.randperm(2 * V, generator=draw)[:V].sort().values.to(device)
        at = torch.randint(2**40, (3, W), generator=draw).to(device)
        for positions in (at, at[:, :1].expand(-1, W)):
            for names in (None, ids):
                tokens, logp = rows.pick(logits, positions, count, names)
                expected, distribution = twin.pick(logits, positions, count, names)
                assert torch.equal(tokens, expected), (W, V, count)
                torch.testing.assert_close(logp, distribution, atol=2e-5, rtol=2e-5)
