"""What must hold on a GPU and can be shown nowhere else: plain functions that raise AssertionError.

The kernels are compared with their twins on the device; graphs with plain calls; and rounds must not wait.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from eval.gpu.draft_models import model_drafts_are_those_of_torch
from eval.gpu.drafts import heads_draft_alike_with_and_without_kernels
from eval.gpu.rows import a_chain_is_bit_identical_in_attention, rows_of_the_kernels_are_independent
from eval.gpu.states import paths_equal_their_twins, states_equal_their_twins
from eval.gpu.trees import picks_are_those_of_tensor_operations, trees_grow_as_on_a_cpu
from eval.runtime.acceptance import match_tensors
from eval.runtime.engine import Engine, Output, Request
from eval.runtime.identity import find_flips, pinned_engine
from eval.runtime.prefill import read_prompts
from eval.runtime.sampling import Sampling
from heads.backends.slot_mapping import ancestors
from heads.backends.triton import accept, attention, choose, experts, gemm, layers, per_head
from heads.backends.triton.cached_decoder import TritonDecoder
from heads.base import Drafter
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from heads.tree import Proposal, parse_shape

SHAPE: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    initializer_range=0.1,
    eos_token_id=2,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": dict(head_dim=64),
    "qwen3_moe": dict(head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128),
    "deepseek_v3": dict(
        num_key_value_heads=8, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64,
        num_experts_per_tok=2, moe_intermediate_size=128,
    ),
}  # fmt: skip
CUDA = torch.device("cuda")


def make_target(family: str, dtype: torch.dtype, device: torch.device = CUDA) -> FrozenTarget:
    """A small random target."""
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if "experts" in str(model):
        model.set_experts_implementation("eager")  # the library's grouped kernels do not take float32 everywhere
    return FrozenTarget(model.to(device), family)


def make_head(target: FrozenTarget) -> Drafter:
    """An untrained EAGLE-3 head, which reads the target's own output head and is right now and then."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = build_head(
            "eagle3", {"aux_layer_ids": [1, 2, 3]}, target, torch.ones(target.vocab_size, dtype=torch.int64)
        )
    drafter: Drafter = head.to(target.device, target.dtype)
    return drafter


def some_requests(vocab: int, count: int = 6, new_tokens: int = 48) -> list[Request]:
    """Greedy, sampled and filtered ones of several lengths."""
    ways = [Sampling(), Sampling(0.8, seed=3), Sampling(0.9, top_k=20, top_p=0.9, seed=4)]
    return [
        Request([3 + (11 * i + 7 * j) % (vocab - 3) for j in range(5 + 40 * i)], new_tokens, ways[i % 3], (), True)
        for i in range(count)
    ]


def texts(outputs: list[Output]) -> list[list[int]]:
    """The tokens alone."""
    return [output.tokens for output in outputs]


def kernels_equal_their_twins(device: torch.device = CUDA) -> None:
    """Attention, products, choice, layer parts, acceptance; float32, where the sums differ in order alone."""
    draw = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw).to(device)

    for N, H, Hkv, d in ((1, 8, 2, 64), (7, 4, 4, 128), (33, 8, 1, 64), (64, 8, 2, 128)):
        parents = torch.tensor([[0, *(int(torch.randint(j, (), generator=draw)) for j in range(1, N))]] * 2).to(device)
        depths = torch.zeros_like(parents)
        for j in range(1, N):
            depths[:, j] = depths.gather(1, parents[:, j : j + 1])[:, 0] + 1
        words, paths = attention.ancestor_words(parents, depths, N)
        twins = attention.ancestor_words_twin(parents, depths, N)
        assert torch.equal(words, twins[0]) and torch.equal(paths, twins[1])
        q, keys, values = random(2, N, H, d), random(2, 700, Hkv, d), random(2, 700, Hkv, d)
        length = torch.tensor([3, 700 - N], device=device)
        expected = attention.tree_attention_twin(q, keys, values, words, length, depths, scale=d**-0.5)
        for own in (None, paths):
            close(attention.tree_attention(q, keys, values, words, length, depths, paths=own), expected)
        proposal = Proposal(torch.randint(2, (2, N), generator=draw).to(device), parents, depths, depths)
        choice = torch.randint(2, (2, N), generator=draw).to(device)
        ours, theirs = (
            accept.accept(proposal, choice, N),
            match_tensors(proposal, choice, ancestors(proposal.parents, N), N),
        )
        assert torch.equal(ours.accepted, theirs.accepted)
        for b, n in enumerate(ours.accepted.tolist()):
            assert torch.equal(ours.path[b, : n + 1], theirs.path[b, : n + 1])
            assert torch.equal(ours.emitted[b, : n + 1], theirs.emitted[b, : n + 1])
    for M, K, N in ((1, 512, 300), (9, 4096, 1024), (64, 1100, 333)):
        x, weight = random(M, K), random(N, K)
        for tile in gemm.TILES:
            close(gemm.skinny_mm(x, weight, tile), (x.double() @ weight.double().T).float(), 1e-3)
        positions = torch.arange(M, device=device)
        temperature = torch.where(positions % 2 == 0, 0.0, 0.8)
        for noisy in (False, True):
            found = choose.choose(x, weight, temperature, positions * 7, positions, noisy=noisy)
            same = found == choose.choose_twin(x, weight, temperature, positions * 7, positions, noisy=noisy)
            assert float(same.float().mean()) > 0.95, "choices differ"
        gate = random(M, 2 * K)
        close(layers.silu_mul(gate), layers.silu_mul_twin(gate))
        stream = random(M, K)
        close(layers.add_norm(stream.clone(), x, weight[0], 1e-5), layers.add_norm_twin(stream, x, weight[0], 1e-5))
        ids = torch.stack([torch.randperm(6, generator=draw)[:2] for _ in range(M)]).to(device)
        bank = random(6, 130, K)
        close(experts.expert_mm(x, ids, bank), experts.expert_mm_twin(x, ids, bank), 1e-3)
        visits, weights = random(M, 3, K), random(M, 3)
        close(experts.weigh_visits(visits, weights, x), experts.weigh_visits_twin(visits, weights, x))
        by_head, own = random(M, 4, 192)[..., :128], random(4, 256, 128)
        for weight in (own.mT, random(4, 128, 256)):
            close(per_head.per_head_mm(by_head, weight), per_head.per_head_mm_twin(by_head, weight), 1e-3)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 2e-5) -> None:
    """Within rounding of float32."""
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def targets_decode_alike_with_and_without_kernels(device: torch.device = CUDA) -> None:
    """Every family in float32: kernels and graphs against the Hugging Face model's plain rounds."""
    for family in FAMILIES:
        target = make_target(family, torch.float32, device)
        requests = some_requests(target.vocab_size, 3, 24)
        expected = Engine(target, batch_size=2, max_length=256, backend="huggingface", graphs=False).generate(requests)
        for shape in ("none", "chain:3", "tree:3x3x8"):
            head = make_head(target) if shape != "none" else None
            engine = Engine(target, head, shape=parse_shape(shape), batch_size=2, max_length=256)
            assert isinstance(engine.decoder.step.decoder, TritonDecoder), f"{family} has no kernels"
            assert texts(engine.generate(requests)) == texts(expected), (family, shape)


def draft_models_draft_alike_with_and_without_kernels(device: torch.device = CUDA) -> None:
    """Of every family, in float32; chains, dynamic and static trees; a long prompt."""
    for family in FAMILIES:
        target = make_target(family, torch.float32, device)
        for shape in ("chain:4", "tree:4x3x12", "static:3.2.1"):
            model_drafts_are_those_of_torch(target, shape)
        model_drafts_are_those_of_torch(target, "tree:3x3x12", prompt=300)


def replays_equal_plain_calls(device: torch.device = CUDA) -> None:
    """In bfloat16, bit for bit, with graphs there."""
    target = make_target("llama", torch.bfloat16, device)
    requests = some_requests(target.vocab_size)
    for shape in ("none", "chain:4", "tree:3x4x12"):
        head = make_head(target) if shape != "none" else None
        options: dict[str, Any] = {"shape": parse_shape(shape), "batch_size": 3, "max_length": 400}
        graphed = Engine(target, head, **options)
        plain = Engine(target, head, **options, graphs=False)
        assert texts(graphed.generate(requests)) == texts(plain.generate(requests)), shape
        assert graphed.rounds[shape].graphs, "nothing was captured"


def rounds_do_not_wait(device: torch.device = CUDA) -> None:
    """Rounds and the sending of reports under torch's debug mode for synchronisation."""
    target = make_target("llama", torch.bfloat16, device)
    engine = Engine(target, make_head(target), shape=parse_shape("tree:3x4x12"), max_length=400)
    with torch.inference_mode():
        read_prompts(engine.decoder, {0: some_requests(target.vocab_size)[0]})
        rounds = engine.rounds_of(engine.decoder)
        rounds(256)
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                rounds(256)
                engine.decoder.round(256)
                engine.reports.send()
                engine.reports.receive()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def graphs_are_small(device: torch.device = CUDA) -> None:
    """A plain step has some ten kernels a layer, more where a product is cut into parts, and some sixty beside; no
    round allocates outside its pool."""
    target = make_target("llama", torch.bfloat16, device)
    engine = Engine(target, max_length=400)
    decoder = engine.decoder
    with torch.inference_mode():
        for _ in range(2):
            decoder.round(512)
        nodes = count_nodes(lambda: decoder.round(512), device)
        assert nodes <= 14 * target.num_layers + 80, f"{nodes} nodes"
        engine.generate(some_requests(target.vocab_size, 1))
        rounds = engine.rounds_of(decoder)
        before = torch.cuda.memory_allocated(device)
        for _ in range(3):
            rounds(256)
        assert torch.cuda.memory_allocated(device) == before


def count_nodes(work: Callable[[], None], device: torch.device) -> int:
    """Kernels that a capture of `work` launches, by the profiler of one replay."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    graph.replay()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize(device)
    events: Any = profile.events()
    return sum(event.device_type.name == "CUDA" for event in events)


def bf16_texts_are_bit_identical(device: torch.device = CUDA) -> None:
    """Chains, and trees under `strict`, against pinned plain decoding; other trees but for near-ties."""
    target = make_target("llama", torch.bfloat16, device)
    requests = some_requests(target.vocab_size, 9)
    for shape, strict in (("chain:4", False), ("tree:3x4x12", True), ("tree:3x4x12", False)):
        engine = Engine(
            target, make_head(target), shape=parse_shape(shape), batch_size=3, max_length=480, strict=strict
        )
        pinned = pinned_engine(engine)
        found, expected = texts(engine.generate(requests)), texts(pinned.generate(requests))
        if shape == "chain:4" or strict:
            assert found == expected, (shape, strict)
        for request, ours, theirs in zip(requests, found, expected, strict=True):
            if ours != theirs:
                assert all(flip.is_near_tie for flip in find_flips(pinned, request, ours)), shape


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        kernels_equal_their_twins,
        states_equal_their_twins,
        paths_equal_their_twins,
        trees_grow_as_on_a_cpu,
        picks_are_those_of_tensor_operations,
        heads_draft_alike_with_and_without_kernels,
        draft_models_draft_alike_with_and_without_kernels,
        rows_of_the_kernels_are_independent,
        a_chain_is_bit_identical_in_attention,
        targets_decode_alike_with_and_without_kernels,
        replays_equal_plain_calls,
        rounds_do_not_wait,
        graphs_are_small,
        bf16_texts_are_bit_identical,
    )
}
"""By name."""
