"""Proofs that need a GPU, the most valuable first: graphs, waiting, and rows that depend on no other row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.engine import Engine, EngineOptions
from eval.runtime.identity import NEAR, find_flips, pinned_engine
from eval.runtime.round import read_prompts
from heads.backends.triton import attention, experts, gemm, per_head
from heads.backends.triton.products import MAKERS, rows_are_independent
from heads.tree import parse_shape
from tests.small_targets import make_head, make_target, some_requests, texts

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_replays_equal_plain_calls() -> None:
    """In bfloat16, bit for bit, with graphs there."""
    target = make_target("llama", torch.bfloat16, CUDA)
    requests = some_requests(target.vocab_size)
    for shape in ("none", "chain:4", "tree:3x4x12"):
        head = make_head(target) if shape != "none" else None
        options: dict[str, Any] = {"shape": parse_shape(shape), "batch_size": 3, "max_length": 400}
        graphed = Engine(target, head, EngineOptions(**options))
        plain = Engine(target, head, EngineOptions(**options, graphs=False))
        assert texts(graphed.generate(requests)) == texts(plain.generate(requests)), shape
        assert graphed.rounds[shape].graphs, "nothing was captured"


def test_rounds_do_not_wait() -> None:
    """Rounds and the sending of reports under torch's debug mode for synchronisation."""
    target = make_target("llama", torch.bfloat16, CUDA)
    engine = Engine(target, make_head(target), EngineOptions(shape=parse_shape("tree:3x4x12"), max_length=400))
    with torch.inference_mode():
        read_prompts(engine.decoder, {0: some_requests(target.vocab_size)[0]})
        rounds = engine.rounds_of(engine.decoder)
        rounds(256)
        torch.cuda.synchronize(CUDA)
        try:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(5):
                rounds(256)
                engine.decoder.round(256)
                engine.reports.send()
                engine.reports.receive()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_rows_of_the_kernels_are_independent() -> None:
    """Of the products that replace the library's where rows are not, or everywhere."""
    bank = torch.randn(8, 768, 2048, generator=torch.Generator().manual_seed(1)).to(CUDA, torch.bfloat16)

    def by_head(x: Tensor, weight: Tensor) -> Tensor:
        own = weight[:, : weight.shape[1] // 16].unflatten(0, (16, -1))
        return per_head.per_head_mm(x.view(len(x), 16, -1), own.mT).flatten(1)

    def visited(x: Tensor, weight: Tensor) -> Tensor:
        ids = torch.stack([x[:, 0] > 0, x[:, 1] > 0], dim=1) + 2 * torch.arange(2, device=CUDA)  # the token's own
        parts = zip(x.split(64), ids.split(64), strict=True)
        visits = torch.cat([experts.expert_mm(*part, bank, min(64, len(x))) for part in parts])
        return experts.weigh_visits(visits, x[:, 2:4].float(), None)

    for M in (1, 6, 33, 64, 70):
        for multiply, N, K in ((by_head, 16 * 512, 16 * 128), (by_head, 16 * 128, 16 * 512), (visited, 1, 2048)):
            weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(CUDA, torch.bfloat16)
            assert rows_are_independent(multiply, weight, M), (multiply.__name__, M, N, K)
    for M in (1, 6, 16, 33, 64):
        for N, K in ((768, 4096), (4096, 4096), (1024, 14336)):
            weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(CUDA, torch.bfloat16)
            for tile in gemm.TILES:
                assert rows_are_independent(MAKERS[str(tile)], weight, M), (M, N, K, tile)


def test_bf16_texts_are_bit_identical() -> None:
    """Chains, and trees under `strict`, against pinned plain decoding; other trees but for near-ties."""
    target = make_target("llama", torch.bfloat16, CUDA)
    requests = some_requests(target.vocab_size, 9)
    for shape, strict in (("chain:4", False), ("tree:3x4x12", True), ("tree:3x4x12", False)):
        engine = Engine(
            target,
            make_head(target),
            EngineOptions(shape=parse_shape(shape), batch_size=3, max_length=480, strict=strict),
        )
        pinned = pinned_engine(engine)
        found, expected = texts(engine.generate(requests)), texts(pinned.generate(requests))
        if shape == "chain:4" or strict:
            assert found == expected, (shape, strict)
        for request, ours, theirs in zip(requests, found, expected, strict=True):
            if ours != theirs:
                assert all(flip.is_within(NEAR) for flip in find_flips(pinned, request, ours)), shape


def test_graphs_are_small() -> None:
    """A plain step has eight kernels a layer, more where the library makes products, and some sixty beside; no round
    allocates outside its pool."""
    target = make_target("llama", torch.bfloat16, CUDA)
    engine = Engine(target, None, EngineOptions(max_length=400))
    decoder = engine.decoder
    with torch.inference_mode():
        for _ in range(2):
            decoder.round(512)
        nodes = count_nodes(lambda: decoder.round(512))
        assert 8 * target.num_layers <= nodes <= 12 * target.num_layers + 80, f"{nodes} nodes"
        engine.generate(some_requests(target.vocab_size, 1))
        rounds = engine.rounds_of(decoder)
        before = torch.cuda.memory_allocated(CUDA)
        for _ in range(3):
            rounds(256)
        assert torch.cuda.memory_allocated(CUDA) == before


def count_nodes(work: Callable[[], None]) -> int:
    """Kernels that a capture of `work` launches, by the profiler of one replay."""
    stream = torch.cuda.Stream(CUDA)
    stream.wait_stream(torch.cuda.current_stream(CUDA))
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    graph.replay()
    torch.cuda.synchronize(CUDA)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize(CUDA)
    events: Any = profile.events()
    return sum(event.device_type.name == "CUDA" for event in events)


def test_a_chain_is_bit_identical_in_attention() -> None:
    """Each node of a chain of 8 against the same query alone among padding."""
    N, S = 8, 1400
    draw = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(1, n, h, 128, generator=draw) for n, h in ((N, 32), (S, 8), (S, 8)))
    q, keys, values = (x.to(CUDA, torch.bfloat16) for x in (q, keys, values))
    depths = torch.arange(N, device=CUDA)[None]
    for strict in (False, True):
        words, paths = attention.ancestor_words((depths - 1).clamp_min(0), depths, N - 1)
        own = paths if strict else None
        for start in (0, 251, 1020, 1275):
            length = torch.tensor([start], device=CUDA)
            chain = attention.tree_attention(q, keys, values, words, length, depths, paths=own)
            for j in range(N):
                padded = q[:, [j] * N].contiguous()
                alone = attention.tree_attention(padded, keys, values, words, length + j, depths, paths=own)
                assert torch.equal(alone[:, 0], chain[:, j]), (strict, start, j)
