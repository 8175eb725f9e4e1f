"""Heads draft by the kernels of a GPU, in Triton's interpreter, what they draft by torch's operations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.engine import Engine, EngineOptions, Request
from heads.backends.selection import BACKENDS, TORCH, TRITON
from heads.backends.slot_mapping import Drafted, Observed
from heads.backends.torch.linear import Norm
from heads.backends.torch.recurrent import TorchRecurrent
from heads.backends.triton.decoder import TritonDecoder
from heads.backends.triton.inputs import enter, stand, take_newest
from heads.backends.triton.recurrent import TritonRecurrent
from heads.base import SharedLayers
from heads.layers import RMSNorm
from heads.registry import build_head
from heads.tree import parse_shape
from scripts.gpu.draft_steps import draft_parts, large_head, some_news
from scripts.grown.shapes import SHAPES, ModelShape
from tests.drafting import SMALL, drafts_are_those_of_torch, some_head
from tests.launches import Launches
from tests.small_targets import make_target
from tests.twins import enter_twin, stand_twin

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are run"),
    pytest.mark.usefixtures("interpreted"),
]

D, V = SMALL["hidden_size"], SMALL["vocab_size"]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("eagle3", "chain:1"), ("mtp", "chain:3"), ("eagle3", "tree:3x2x5")),
        *(("eagle3 as speculators has it", "tree:2x2x3"), ("eagle3 with a window", "tree:3x2x4")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((name, "chain:3") for name in ("eagle3", "eagle3.1", "mtp, token first")),
                *(("mtp", "tree:3x3x9"), ("mtp", "static:3.2.1"), ("eagle3 with a window", "chain:3")),
            )
        ),
    ],
)
def test_drafts_are_those_of_torch(name: str, shape: str) -> None:
    prompt = 30 if "window" in name else 5
    drafts_are_those_of_torch(name, shape, CPU, prompt=prompt, table=name != "eagle3.1")


@pytest.mark.slow
def test_many_tokens_and_nodes_take_several_words() -> None:
    """A prompt of 140 tokens, over two splits of the cache, and 66 nodes that are expanded."""
    drafts_are_those_of_torch("eagle3", "tree:4x22x40", CPU, prompt=140)


def test_what_the_kernels_do_not_know_is_left_to_torch() -> None:
    """Several modules, wider numbers, layers that are more than products."""
    adapted = some_head("mtp", CPU)
    block: Any = adapted.mtp_layers[0].block  # type: ignore[index, union-attr]
    block.mlp.up_proj = Adapted(block.mlp.up_proj)
    for head in (some_head("mtp of three", CPU), some_head("eagle3", CPU, torch.float64), adapted):
        shared = SharedLayers(torch.nn.Embedding(99, 1), torch.nn.Identity(), torch.zeros(99, 1))
        state = head.new_state(shared, batch_size=1, capacity=9, shape=parse_shape("chain:2"), backend=TRITON)
        assert isinstance(state.steps, TorchRecurrent)


class Adapted(torch.nn.Linear):
    """A product with something added."""

    def __init__(self, of: torch.nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
@pytest.mark.parametrize(("shape", "most"), [("chain", 13), ("tree", 14)])
def test_a_draft_step_is_few_launches(name: str, shape: str, most: int) -> None:
    """At the shape of Llama-3.1-8B: what a level more takes, its picks included, and what it takes to extend a head by
    six tokens. A head that projects its input has two more, and one less that fuses no auxiliary hidden states."""
    head, shared = large_head(name, SHAPES["llama-3.1-8b"], torch.device("meta"))
    mtp, counts = name == "mtp", []
    for depth in (2, 3):
        text = f"chain:{depth}" if shape == "chain" else f"tree:{depth}x8x32"
        state = head.new_state(shared, batch_size=1, capacity=2048, shape=parse_shape(text), backend=TRITON)
        news = some_news(state, 6)
        for _ in range(2):  # some things are made once
            with Launches(runs=False) as drafting:
                head.propose(state, TRITON.sampling(1).pick)
            with Launches(runs=False) as telling:
                head.extend(state, news)
        counts.append(drafting.names.total())
    assert counts[1] - counts[0] == most + 2 * mtp, drafting.names
    assert telling.names.total() == 12 + mtp, telling.names
    assert {"_enter", "_rope_write", "_attention", "_take_newest"} <= {*drafting.names, *telling.names}


def test_steps_to_time_run_through() -> None:
    def seconds(work: Callable[[], Any], device: torch.device) -> float:
        work()
        return 1.0

    shape = ModelShape(32, 2, 2, 1, 16, 48, 70)
    with torch.no_grad():
        parts = draft_parts(shape, 20, CPU, seconds)
    assert len(parts) == 12 and all(part.bytes > 0 and part.seconds > 0 for part in parts)


@pytest.mark.parametrize("observed", [True, False])
@pytest.mark.parametrize(("state_first", "zero_first"), [(True, True), (False, True), (False, False)])
def test_inputs(observed: bool, state_first: bool, zero_first: bool) -> None:
    """Three rows of four tokens; paths hold any of the 70 slots behind the observed ones."""
    B, W, A, S = 3, 4, 5, 90
    tokens, rows = torch.randint(V, (B, W)), torch.randint(A, (B, W))
    table, states = torch.randn(V, D), torch.randn(B, A, D)
    norms = [Norm(RMSNorm(D, 1e-5)) for _ in range(2)]
    for norm in norms:
        norm.weight.normal_()
    slot, length = torch.arange(S), torch.tensor([0, 7, S - 3])
    paths = torch.stack([torch.stack([torch.randperm(70)[:3] for _ in range(W)]) for _ in range(B)])
    drafted = Drafted(length.clamp_max(S - 71), paths, slot, False)
    mapping = Observed(length, torch.tensor([4, 0, 2]), slot, W) if observed else drafted
    options: dict[str, Any] = dict(behind=70, state_first=state_first, zero_first=zero_first)
    for embedded, parents in ((table, rows), (table[tokens], None)):
        given = states if parents is not None else states[:, :W]
        *ours, entered = enter(tokens, embedded, given, parents, mapping, *norms, **options)
        *theirs, expected = enter_twin(tokens, embedded, given, parents, mapping, *norms, **options)
        torch.testing.assert_close(ours, theirs)
        read = ours[0][:, D:] if state_first else ours[0][:, :D]
        assert torch.equal(read.eq(0).all(1), (expected.positions == 0) & zero_first)
        for at in (entered, stand(mapping, behind=70)):
            for field in ("positions", "slots", "words"):
                assert torch.equal(getattr(at, field), getattr(expected, field)), field
        assert entered.words.shape == (B, W, 1 if observed else 2)
    if not observed:
        for bits, path in zip(entered.words.flatten(0, 1).tolist(), paths.flatten(0, 1).tolist(), strict=True):
            assert {j for j in range(70) if bits[j // 64] >> (j % 64) & 1} == set(path)


def test_tokens_that_are_all_true_need_no_count() -> None:
    mapping = Observed(torch.tensor([0, 7, 87]), None, torch.arange(90), 2)
    ours, theirs = stand(mapping, behind=2), stand_twin(mapping, behind=2)
    assert torch.equal(ours.positions, theirs.positions) and ours.positions.tolist() == [0, 1, 7, 8, 87, 88]
    assert torch.equal(ours.slots, theirs.slots) and ours.slots.tolist() == [0, 1, 97, 98, 267, 268]


def test_the_newest_true_token_is_drafted_from() -> None:
    made, tokens = torch.randn(3, 4, D), torch.randint(V, (3, 5))
    start, count = torch.tensor([5, 9, 2]), torch.tensor([4, 0, 1])
    before = torch.randn(3, D), torch.tensor([50, 51, 52]), torch.tensor([5, 9, 2]), torch.tensor([60, 61, 62])
    recycled, root, length, previous = (x.clone() for x in before)
    take_newest(tokens, start, count, root, length, recycled=recycled, made=made)
    take_newest(tokens, start, count, root, length, previous=previous)
    assert torch.equal(recycled, torch.stack([made[0, 3], before[0][1], made[2, 0]]))
    assert root.tolist() == [int(tokens[0, 4]), 51, int(tokens[2, 1])] and length.tolist() == [9, 9, 3]
    assert previous.tolist() == [int(tokens[0, 3]), 61, int(tokens[2, 0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"), [("eagle3", "tree:3x3x8"), ("mtp", "chain:3"), ("draft", "tree:2x3x7"), ("draft", "chain:3")]
)
def test_whole_texts_are_drafted_alike(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head alone by kernels: prompts of several lengths, rows that end and are taken by others, few tokens, so that
    an untrained head is right now and then."""
    sizes: Any = dict(hidden_size=64, intermediate_size=64, vocab_size=19, num_attention_heads=4)
    target = make_target("llama", torch.float32, **sizes)
    requests = [Request([3 + i] * (2 + 3 * i), 9 + i, ignore_eos=True) for i in range(4)]
    options = EngineOptions(batch_size=2, max_length=64, backend="torch")
    plain = Engine(target, None, options).generate(requests)
    # Whose decoder reads no masks needs an acceptance that reads parents.
    kernels = replace(TORCH, decoder=TRITON.decoder, recurrent=TRITON.recurrent, match=TRITON.match)
    found = []
    for backend in (TORCH, kernels):
        settings: dict[str, Any] = {
            "eagle3": {"aux_layer_ids": [1, 2, 3]},
            "mtp": {"depth": 3},
            "draft": {"layers": [0, 1]},
        }
        with torch.random.fork_rng():
            torch.manual_seed(0)
            head = build_head(kind, settings[kind], target, torch.ones(target.vocab_size).long())
        monkeypatch.setitem(BACKENDS, "torch", backend)
        engine = Engine(target, head, replace(options, shape=parse_shape(shape)))
        state = engine.decoder.head_state
        drafts_by = state.decoder if kind == "draft" else state.steps
        assert isinstance(drafts_by, TritonDecoder | TritonRecurrent) == (backend is not TORCH)
        outputs = engine.generate(requests)
        assert [o.tokens for o in outputs] == [o.tokens for o in plain]
        found.append([o.accepted for o in outputs])
    assert found[0] == found[1] and sum(map(sum, found[0])) > 0
